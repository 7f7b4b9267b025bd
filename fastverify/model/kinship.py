"""Signs that a drafter was made for another model. They warn and never refuse."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastverify.errors import ConfigError
from fastverify.model.files import read_json

VERSION = re.compile(r"(?<![a-z])([a-z]+)-?(\d+(?:\.\d+)*)(?![a-z\d])")
NOT_VERSIONS = frozenset({"eagle", "fp", "nvfp", "mxfp", "int", "bf", "w", "tp", "bit", "draft"})
BASE_MODEL_FIELDS = ("base_model", "base_model_name_or_path", "target_model", "target_model_path")
TOKENIZER_FILES = ("tokenizer.json", "tiktoken.model", "tokenizer.model")


def kinship_warnings(
    target: str,
    draft: str,
    raw: Mapping[str, Any],
    target_folder: Path | None,
    draft_folder: Path,
) -> Iterator[str]:
    """Warnings from names, from the base model in the drafter's config, and from tokenizers.

    target, draft: names or paths as given; raw: the drafter's config.json.
    """
    stated = [str(raw[field]) for field in BASE_MODEL_FIELDS if isinstance(raw.get(field), str)]
    for name in (draft, *stated):
        clash = version_clash(target, name)
        if clash:
            yield (
                f"draft {draft} seems to be made for {clash[1]}, not {clash[0]}: expect it to be"
                " accepted less often."
            )
            break
    if target_folder is not None:
        yield from _tokenizer_warnings(target_folder, draft_folder, draft)


def version_clash(target: str, draft: str) -> tuple[str, str] | None:
    """The first version that two model names give differently (K2.6, K2.5); dots do not count."""
    ours, theirs = versions(target), versions(draft)
    for family, version in ours.items():
        other = theirs.get(family)
        if other and other.replace(".", "") != version.replace(".", ""):
            return f"{family}{version}".upper(), f"{family}{other}".upper()
    return None


def versions(name: str) -> dict[str, str]:
    """Version numbers in the last part of a name or path: Kimi-K2.5-eagle3 -> {"k": "2.5"}."""
    last = name.rstrip("/").removesuffix("/config.json").rsplit("/", 1)[-1].lower()
    found = VERSION.findall(last.replace("_", "-"))
    return {family: number for family, number in found if family not in NOT_VERSIONS}


def _tokenizer_warnings(target: Path, draft: Path, name: str) -> Iterator[str]:
    for file in TOKENIZER_FILES:
        ours, theirs = target / file, draft / file
        if not (ours.is_file() and theirs.is_file()) or _digest(ours) == _digest(theirs):
            continue
        if file != "tokenizer.json":
            yield f"draft {name} has another {file} than the target."
            continue
        mine, other = _vocabulary(ours), _vocabulary(theirs)
        if mine != other:
            yield (
                f"draft {name} has a tokenizer.json of {len(other)} tokens that differs from the"
                f" target's of {len(mine)}."
            )


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _vocabulary(path: Path) -> dict[str, Any]:
    """Tokens and ids; empty when the file cannot be read as one."""
    try:
        model = read_json(path, "tokenizer").get("model")
    except ConfigError:
        return {}
    vocab = model.get("vocab") if isinstance(model, dict) else None
    return vocab if isinstance(vocab, dict) else {}
