"""Which NCCL this environment will load, found without importing torch."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
from collections.abc import Callable, Mapping

import msgspec

PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
_LIBRARY = "nvidia/nccl/lib/libnccl.so.2"

Lookup = Callable[[str], importlib.metadata.Distribution]


class NcclLibrary(msgspec.Struct, frozen=True):
    """`version` as NCCL itself reports it, `origin` why this file, `packages` who claims it."""

    version: str | None
    origin: str | None
    packages: tuple[str, ...]


def read_nccl(
    environ: Mapping[str, str],
    lookup: Lookup = importlib.metadata.distribution,
    ask: Callable[[str], int | None] | None = None,
) -> NcclLibrary:
    """The NCCL that collectives will run on.

    A preloaded library wins over everything. SGLANG_NCCL_SO_PATH is next, because SGLang's own
    communicator loads it. torch carries an RPATH to the wheel's file, so LD_LIBRARY_PATH does not
    matter; VLLM_NCCL_SO_PATH is not read by SGLang 0.5.23.
    """
    packages, bundled = _packages(lookup)
    preload = environ.get("LD_PRELOAD", "").replace(":", " ").split()
    candidates = [
        ("LD_PRELOAD", next((p for p in preload if "nccl" in os.path.basename(p)), None)),
        ("SGLANG_NCCL_SO_PATH", environ.get("SGLANG_NCCL_SO_PATH") or None),
        ("package", bundled),
    ]
    for origin, path in candidates:
        if path is not None:
            code = (ask or _ask)(path)
            return NcclLibrary(None if code is None else decode_version(code), origin, packages)
    return NcclLibrary(None, None, packages)


def decode_version(code: int) -> str:
    """NCCL's integer version as dotted text; the scale changed with 2.9."""
    scale = 1000 if code < 10000 else 10000
    return f"{code // scale}.{code % scale // 100}.{code % 100}"


def _packages(lookup: Lookup) -> tuple[tuple[str, ...], str | None]:
    names: list[str] = []
    path = None
    for name in PACKAGES:
        try:
            distribution = lookup(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        names.append(f"{name}=={distribution.version}")
        for file in distribution.files or ():
            if str(file) == _LIBRARY:
                path = str(distribution.locate_file(file))
    return tuple(names), path


def _ask(path: str) -> int | None:
    try:
        library = ctypes.CDLL(path)
        code = ctypes.c_int(0)
        status = library.ncclGetVersion(ctypes.byref(code))
    except (OSError, AttributeError):
        return None
    return code.value if status == 0 else None
