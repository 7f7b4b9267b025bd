"""The module that a CPU run sees as `sgl_kernel`: torch where upstream calls C++.

Only what EAGLE-3 serving of the DeepSeek-V3 and Llama classes calls is here. It follows private
signatures of SGLang 0.5.23, so it fits that release alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from fastverify.cpu.attention import decode_attention_cpu, extend_attention_cpu
from fastverify.cpu.slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from fastverify.cpu.tree import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "attach_operators",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

__version__ = "0+fastverify.cpu"
# A package without submodules: importing one says so by name.
__path__: list[str] = []


def attach_operators() -> None:
    """Make the two attention functions readable as `torch.ops.sgl_kernel.<name>`.

    Plain attributes suffice: SGLang calls them eagerly and never through the dispatcher.
    """
    torch.ops.sgl_kernel.decode_attention_cpu = decode_attention_cpu
    torch.ops.sgl_kernel.extend_attention_cpu = extend_attention_cpu


def __getattr__(name: str) -> Callable[..., NoReturn]:
    # SGLang imports some CPU functions by name and never calls them here, and it asks whether
    # others exist: only names that are CPU functions for certain get a placeholder.
    if not name.endswith("_cpu"):
        raise AttributeError(f"the CPU stand-in for sgl_kernel has no {name!r}")

    def uncovered(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not covered by the CPU stand-in")

    return uncovered
