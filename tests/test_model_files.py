"""Where a model's files are and whether its weights are whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from fastverify.model.config import load_model_config
from fastverify.model.files import read_tensors, resolve
from tests.checkpoints import TARGET, write_model
from tests.sentences import check_refused


def save(folder: Path, name: str = "model.safetensors") -> None:
    save_file({"a": np.zeros((4, 4), np.float16)}, folder / name)


@pytest.mark.parametrize("suffix", ["", "/", "/config.json"])
def test_a_folder_or_its_config_json_names_a_model(tmp_path: Path, suffix: str) -> None:
    name = write_model(tmp_path / "m", TARGET, {"a": np.zeros(4, np.float16)}) + suffix
    files = resolve(name)
    assert (files.source, files.folder, files.config) == ("folder", tmp_path / "m", TARGET)
    config = load_model_config(files)
    assert config is not None
    assert config.weights_on_disk
    assert config.weight_bytes == (tmp_path / "m" / "model.safetensors").stat().st_size


@pytest.mark.parametrize(
    "name", ["no/such/folder", "./missing", "/missing", "kimi", "", " ", "a b"]
)
def test_a_path_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    message = check_refused(
        resolve, name, what="draft", cache_dir=tmp_path, says=("draft", "OWNER/NAME")
    )
    assert repr(name) in message


def test_a_file_that_is_no_config_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"x")
    check_refused(resolve, str(tmp_path / "weights.gguf"), says=("weights.gguf", "folder"))


def test_a_hub_name_is_looked_up_on_disk_only(tmp_path: Path) -> None:
    files = resolve("owner/name", cache_dir=tmp_path)
    assert (files.source, files.folder) == ("hub", None)
    assert load_model_config(files) is None
    assert read_tensors(files, "model") == {}


def test_a_cached_hub_name_is_read(tmp_path: Path) -> None:
    repo = tmp_path / "models--owner--name"
    write_model(repo / "snapshots" / "abc", TARGET)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    files = resolve("owner/name", cache_dir=tmp_path)
    assert (files.source, files.config) == ("cache", TARGET)
    config = load_model_config(files)
    assert config is not None and not config.weights_on_disk
    index = {"weight_map": {"a": "one.safetensors"}}
    (repo / "snapshots" / "abc" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model_config(files) is not None, "the hub will bring the rest"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", ("line 1, column 2",)),
        (b"", ("line 1, column 1",)),
        (b"\xff\xfe{", ("UnicodeDecodeError",)),
        (b"[" * 100_000, ("RecursionError",)),
        (b"[1]", ("list", "object")),
        (b"null", ("NoneType", "object")),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(
    tmp_path: Path, content: bytes, says: tuple[str, ...]
) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    check_refused(resolve, str(tmp_path), says=(str(path), *says))


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    check_refused(resolve, str(tmp_path), says=(str(tmp_path), "config.json"))


def test_an_unreadable_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path, TARGET)

    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", denied)
    check_refused(resolve, str(tmp_path), says=("Permission denied", str(tmp_path / "config.json")))


def cut_header(data: bytes) -> bytes:
    return data[:20]


def cut_tensors(data: bytes) -> bytes:
    return data[:-1]


def only_two_bytes(data: bytes) -> bytes:
    return data[:2]


def not_safetensors(data: bytes) -> bytes:
    return (4).to_bytes(8, "little") + b"abcd"


def lfs_pointer(data: bytes) -> bytes:
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 7\n"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (cut_header, ("cut off", 20)),
        (only_two_bytes, ("cut off", 2)),
        (cut_tensors, ("not a whole safetensors file",)),
        (not_safetensors, ("not a whole safetensors file", 12)),
        (lfs_pointer, ("Git LFS pointer",)),
    ],
)
def test_damaged_weights_are_refused(tmp_path: Path, damage: Any, says: tuple[object, ...]) -> None:
    name = write_model(tmp_path, TARGET, {"a": np.zeros((4, 4), np.float16)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    check_refused(load_model_config, resolve(name), says=(str(path), *says))
    assert load_model_config(resolve(name), dummy_weights=True) is not None


def test_absent_weights_are_refused_unless_they_are_made_up(tmp_path: Path) -> None:
    name = write_model(tmp_path, TARGET)
    check_refused(load_model_config, resolve(name), says=(name, "--load-format dummy"))
    config = load_model_config(resolve(name), dummy_weights=True)
    assert config is not None and config.weight_bytes > 0 and not config.weights_on_disk


def test_pickled_weights_count_by_size(tmp_path: Path) -> None:
    name = write_model(tmp_path, TARGET)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 1234)
    config = load_model_config(resolve(name))
    assert config is not None and config.weight_bytes == 1234


def test_shards_named_by_the_index_must_be_there(tmp_path: Path) -> None:
    name = write_model(tmp_path, TARGET)
    names = {"a": "1.safetensors", "b": "2.safetensors", "c": "3.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    save(tmp_path, "1.safetensors")
    check_refused(load_model_config, resolve(name), says=("2 of the 3", "2.safetensors"))
    save(tmp_path, "2.safetensors")
    save(tmp_path, "3.safetensors")
    config = load_model_config(resolve(name))
    assert config is not None
    assert config.weight_bytes == sum(p.stat().st_size for p in tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}])
def test_an_index_without_names_is_refused(tmp_path: Path, weight_map: Any) -> None:
    name = write_model(tmp_path, TARGET)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    check_refused(load_model_config, resolve(name), says=(str(index), "weight_map"))


def test_headers_are_read_without_the_weights(tmp_path: Path) -> None:
    name = write_model(tmp_path, TARGET, {"a": np.zeros((4, 2), np.float16), "b": np.ones(3, bool)})
    found = read_tensors(resolve(name), "model")
    assert {k: (t.dtype, t.shape) for k, t in found.items()} == {
        "a": ("F16", (4, 2)),
        "b": ("BOOL", (3,)),
    }
