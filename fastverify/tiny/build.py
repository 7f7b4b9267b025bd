"""Makes the tiny model once per recipe and keeps it in the cache."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from fastverify.env import cache_dir
from fastverify.errors import ConfigError

Drafter = Literal["llama", "mla"]

_RECIPE = ("build.py", "config.py", "drafter.py", "target.py", "tokenizer.py")
_MANIFEST = "manifest.json"
LOCK_TIMEOUT_S = 120.0


class TinyPaths(NamedTuple):
    """Folders in Hugging Face layout; the tokenizer lies with the target."""

    target: pathlib.Path
    draft: pathlib.Path


def build_tiny(
    cache: pathlib.Path | None = None,
    drafter: Drafter = "llama",
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> TinyPaths:
    """The tiny target and one of its drafters, made now unless the cache has them.

    cache: folder for made things, by default that of `FASTVERIFY_CACHE`. The model lies in
    `tiny/KEY` below it, KEY being a digest of the recipe, so that a changed recipe is made anew.
    Concurrent callers wait for one of them; a reader never sees half a model, and a damaged one is
    replaced. ConfigError when the folder cannot be used or the wait exceeds `lock_timeout_s`.
    """
    paths = tiny_paths(cache, drafter)
    made = paths.target.parent
    parent = made.parent
    try:
        if not _complete(made):
            parent.mkdir(parents=True, exist_ok=True)
            with _locked(parent / f"{made.name}.lock", lock_timeout_s):
                # Another process may have made it during the wait.
                if not _complete(made):
                    _make(made)
    except OSError as error:
        raise ConfigError(
            f"the tiny model cannot be kept in {parent} ({error.strerror or error}): free or allow"
            " that folder, or name another one in FASTVERIFY_CACHE."
        ) from error
    return paths


def tiny_paths(cache: pathlib.Path | None = None, drafter: Drafter = "llama") -> TinyPaths:
    """Where `build_tiny` puts its files; makes nothing and does not load torch."""
    made = (cache_dir() if cache is None else cache) / "tiny" / recipe_key()
    return TinyPaths(made / "target", made / f"draft-{drafter}")


def recipe_key() -> str:
    """Digest of the source files that decide what the model is."""
    digest = hashlib.sha256()
    for name in _RECIPE:
        digest.update(pathlib.Path(__file__).with_name(name).read_bytes())
    return digest.hexdigest()[:16]


def _complete(made: pathlib.Path) -> bool:
    """Whether every file of the manifest is there in its full size."""
    try:
        sizes = json.loads((made / _MANIFEST).read_bytes())
        return all((made / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, ValueError):
        return False


@contextlib.contextmanager
def _locked(path: pathlib.Path, timeout_s: float) -> Iterator[None]:
    """An exclusive lock that ends with the process that holds it."""
    deadline = time.monotonic() + timeout_s
    with path.open("w") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process has been making the tiny model for {timeout_s:.0f} s"
                        f" (it holds {path}): wait for it or end it, then start again."
                    ) from None
                time.sleep(0.1)
        yield


def _make(made: pathlib.Path) -> None:
    """Write everything aside, then put it in place with one rename."""
    aside = pathlib.Path(tempfile.mkdtemp(prefix=f"{made.name}.", dir=made.parent))
    try:
        _write_models(aside)
        files = [path for path in aside.rglob("*") if path.is_file()]
        sizes = {str(path.relative_to(aside)): path.stat().st_size for path in files}
        _write_json(aside / _MANIFEST, sizes)
        aside.chmod(0o755)
        if made.exists():
            # Damaged. Servers that have it open keep their files.
            shutil.rmtree(made)
        os.rename(aside, made)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _write_models(folder: pathlib.Path) -> None:
    # Late, because a plan needs the paths but must not load torch.
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from fastverify.tiny import drafter, target, tokenizer
    from fastverify.tiny.config import CONFIG

    tensors = target.target_tensors()
    models: dict[str, tuple[dict[str, Any], target.Tensors]] = {
        "target": (CONFIG, tensors),
        "draft-llama": (drafter.LLAMA_CONFIG, drafter.llama_tensors(tensors)),
        "draft-mla": (drafter.MLA_CONFIG, drafter.mla_tensors(tensors)),
    }
    for name, (config, weights) in models.items():
        (folder / name).mkdir()
        _write_json(folder / name / "config.json", config)
        try:
            save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            # Its own exception for a full disk or a lost permission.
            raise OSError(str(error)) from error
    for file_name, content in tokenizer.tokenizer_files().items():
        _write_json(folder / "target" / file_name, content)


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
