"""Where a model's files are, and what they say without loading a weight."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from fastverify.errors import ConfigError

HUB_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
INDEX = "model.safetensors.index.json"
MAP_DTYPES = ("I64", "I32", "I16", "U8", "I8", "BOOL")
LFS_HEAD = b"version https://git-lfs"


class ModelFiles(msgspec.Struct, frozen=True):
    """A model as named by the user. source "hub": not on this disk, folder and config are None."""

    name: str
    source: Literal["folder", "cache", "hub"]
    folder: Path | None = None
    config: dict[str, Any] | None = None


class Tensor(msgspec.Struct, frozen=True):
    """One entry of a safetensors header. dtype as written there: BF16, I64, BOOL."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def resolve(name: str, *, what: str = "model", cache_dir: Path | None = None) -> ModelFiles:
    """Find a model by folder, path of a config.json, or name in the local Hugging Face cache.

    what: the word for it in messages. cache_dir: another cache than the user's.
    Never uses the network: a hub name that is not cached comes back with source "hub".
    Raises ConfigError for a path that does not exist and for an unreadable config.json.
    """
    path = Path(os.path.expanduser(name))
    if name.strip() and os.path.isdir(path):
        return ModelFiles(name, "folder", path, read_json(path / "config.json", what))
    if os.path.isfile(path):
        if path.name != "config.json":
            raise ConfigError(
                f"{what} {name!r} is a file where a folder, a config.json or a hub name is needed:"
                " give the folder that holds its config.json."
            )
        return ModelFiles(name, "folder", path.parent, read_json(path, what))
    return _from_hub(name, what, cache_dir)


def _from_hub(name: str, what: str, cache_dir: Path | None) -> ModelFiles:
    from huggingface_hub import try_to_load_from_cache

    legal = HUB_NAME.fullmatch(name) is not None
    if legal:
        try:
            cached = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir)
        except ValueError:  # a name the hub itself would refuse
            legal, cached = False, None
        if isinstance(cached, str):
            path = Path(cached)
            return ModelFiles(name, "cache", path.parent, read_json(path, what))
    if legal and "/" in name:
        return ModelFiles(name, "hub")
    raise ConfigError(
        f"{what} {name!r} is no readable folder or file here and no hub name of the form"
        " OWNER/NAME: check the path."
    )


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError naming the file and what is wrong with it."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"{what} {path.parent} has no {path.name}: give the folder that holds it."
        ) from None
    except OSError as error:
        raise ConfigError(f"{what} file {path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        place = (
            f"at line {error.lineno}, column {error.colno}"
            if isinstance(error, json.JSONDecodeError)
            else f"({type(error).__name__})"
        )
        raise ConfigError(
            f"{what} file {path} is not valid JSON {place}: restore or download it again."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{what} file {path} holds a JSON {type(value).__name__} where an object is needed:"
            " restore or download it again."
        )
    return value


def weight_files(files: ModelFiles, what: str) -> tuple[Path, ...]:
    """The safetensors files of a model, or none when it has no complete set of them.

    A shard that the index names and the folder lacks is refused in a folder of the user's; in the
    hub's cache it means that SGLang will download it.
    """
    if files.folder is None:
        return ()
    index = files.folder / INDEX
    if not index.exists():
        return tuple(sorted(files.folder.glob("*.safetensors")))
    names = read_json(index, what).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ConfigError(
            f"{what} file {index} has no weight_map of tensor names to files: download it again."
        )
    shards = tuple(files.folder / name for name in sorted(set(names.values())))
    missing = [shard.name for shard in shards if not shard.exists()]
    if missing and files.source == "folder":
        raise ConfigError(
            f"{what} {files.name} lacks {len(missing)} of the {len(shards)} weight files its index"
            f" names, the first of them {missing[0]}: download them again."
        )
    return () if missing else shards


def pickled_weights(files: ModelFiles) -> tuple[Path, ...]:
    """Weight files whose tensors cannot be listed without running their pickle."""
    if files.folder is None:
        return ()
    return tuple(sorted(p for ext in ("bin", "pt", "pth") for p in files.folder.glob(f"*.{ext}")))


def disk_bytes(files: ModelFiles, what: str) -> int | None:
    """Size of a model's weights, None when they are not on this disk.

    Opens every safetensors header, so that a cut-off download is refused before the long load.
    """
    shards = weight_files(files, what)
    for shard in shards:
        with open_weights(shard, what):
            pass
    found = shards or pickled_weights(files)
    return sum(path.stat().st_size for path in found) or None


def read_tensors(files: ModelFiles, what: str) -> dict[str, Tensor]:
    """Names, dtypes and shapes of all tensors in a model's safetensors files."""
    tensors = {}
    for path in weight_files(files, what):
        with open_weights(path, what) as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                tensors[name] = Tensor(path, part.get_dtype(), tuple(part.get_shape()))
    return tensors


def load_map(tensor: Tensor, name: str, what: str) -> NDArray[Any]:
    """Load a vocabulary map; ConfigError when it holds neither whole numbers nor flags."""
    if tensor.dtype not in MAP_DTYPES:
        raise ConfigError(
            f"{what} file {tensor.file} stores {name} as {tensor.dtype}, but a vocabulary map is"
            f" one of {', '.join(MAP_DTYPES)}: export the drafter again."
        )
    with open_weights(tensor.file, what) as opened:
        return np.asarray(opened.get_tensor(name))


@contextmanager
def open_weights(path: Path, what: str) -> Iterator[Any]:
    """Open a safetensors file; ConfigError says whether it is cut off, a pointer or damaged."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(len(LFS_HEAD))
    except OSError as error:
        raise ConfigError(f"{what} file {path} cannot be read: {error.strerror}.") from error
    if head == LFS_HEAD:
        raise ConfigError(
            f"{what} file {path} is a Git LFS pointer of {size} bytes, not the weights: fetch them"
            " with `git lfs pull`."
        )
    needed = 8 + int.from_bytes(head[:8], "little")
    if size < needed:
        raise ConfigError(
            f"{what} file {path} is cut off: its header alone takes {needed} bytes and the file has"
            f" {size}, so download it again."
        )
    try:
        opened = safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"{what} file {path} of {size} bytes is not a whole safetensors file ({reason}):"
            " download it again."
        ) from error
    with opened as reader:
        yield reader
