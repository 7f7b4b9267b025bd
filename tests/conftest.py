"""Without a GPU the suite imports SGLang's CPU branches; GPU tests are skipped with the reason."""

from __future__ import annotations

import os

import pytest


def has_gpu() -> bool:
    """True when torch sees a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


HAS_GPU = has_gpu()
if not HAS_GPU:
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu` tests where there is none."""
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))
