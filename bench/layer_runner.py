"""One rank's model in this process: SGLang's own ModelRunner, without scheduler or server.

Weights are drawn so that routing differs from row to row. SGLang's dummy weights make every row
choose the same experts (norms of 1e-3, a bias that outweighs the router), which would hide what
more verify rows cost.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import tempfile
from typing import Any

import torch

from bench.shapes import Shape, rank_bytes, rank_config
from fastverify.errors import ConfigError

HEADROOM_BYTES = 6 << 30
BRANCH_GAIN = 0.1
INT4_STEP = 0.002


def device() -> str:
    """`cuda` with a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_memory(shape: Shape, tp: int, layers: int, tokens: int) -> None:
    """ConfigError when the rank does not fit the GPU's free memory."""
    free, _ = torch.cuda.mem_get_info()
    need = sum(rank_bytes(shape, tp, layers, tokens).values()) + HEADROOM_BYTES
    if need > free:
        raise ConfigError(
            f"{layers} layers of {shape.name} at TP={tp} need {need / 1e9:.0f} GB and"
            f" {free / 1e9:.0f} GB of GPU memory are free: pass --layers"
            f" {max(shape.first_k_dense_replace + 2, int(layers * free / need * 0.9))} or a larger"
            " --tp."
        )


def server_settings(folder: str, tokens: int, context: int, slots: int, moe: str) -> dict[str, Any]:
    """ServerArgs fields of the in-process rank."""
    on_gpu = device() == "cuda"
    return {
        "model_path": folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": device(),
        "tp_size": 1,
        "dtype": "bfloat16",
        "context_length": context,
        "max_total_tokens": tokens,
        "max_running_requests": slots,
        "mem_fraction_static": 0.85 if on_gpu else 0.3,
        "attention_backend": "triton" if on_gpu else "intel_amx",
        "moe_runner_backend": moe,
        "disable_cuda_graph": True,
        "disable_radix_cache": True,
        "disable_shared_experts_fusion": True,
        "log_level": "error",
    }


def write_config(config: dict[str, Any]) -> str:
    """A temporary model folder that holds only config.json."""
    folder = tempfile.mkdtemp(prefix="fastverify-bench-")
    (pathlib.Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def build_runner(
    shape: Shape, tp: int, layers: int, *, tokens: int, context: int, slots: int, moe: str
) -> Any:
    """A loaded ModelRunner with its KV pool, and no graphs.

    tokens: KV slots. context: longest sequence. slots: requests. moe: SGLang's runner name.
    """
    if device() == "cpu":
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import PortArgs, ServerArgs

    load_plugins()
    folder = write_config(rank_config(shape, tp, layers))
    args = ServerArgs(**server_settings(folder, tokens, context, slots, moe))
    args.resolve_once()
    publish_config(args)
    runner = start_runner(args, PortArgs.init_new(args).nccl_port)
    fill_weights(runner)
    return runner


def publish_config(args: Any) -> None:
    """Publish args as this process's config, as a scheduler process does on start."""
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.layers.quantization.fp4_utils import initialize_fp4_gemm_config
    from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
    from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    _set_envs_and_config(args)
    rank = spawn_world_rank(args, tp_rank=0, pp_rank=0)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=rank, gpu_id=0))
    initialize_moe_config()
    initialize_fp8_gemm_config()
    initialize_bf16_gemm_config()
    initialize_fp4_gemm_config()


def start_runner(args: Any, port: int) -> Any:
    """Load the model of published args and allocate its KV pool and attention backend."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_executor.model_runner import ModelRunner

    model_config = ModelConfig.from_server_args(args)
    bootstrap.init_parallel_runtime(server_args=args, device=device(), dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    runner = ModelRunner(
        model_config=model_config,
        mem_fraction_static=resolving_view(args).mem_fraction_static,
        gpu_id=0,
        nccl_port=port,
        server_args=args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    return runner


@torch.no_grad()
def fill_weights(runner: Any) -> None:
    """Random weights with a residual stream that the embedding dominates.

    Rows with different tokens then stay different through all layers, so that they route
    independently: the most distinct experts a verify step can touch.
    """
    for name, weight in runner.model.named_parameters():
        fill_weight(name, weight.data)
    for layer in runner.model.model.layers:
        attention = layer.self_attn
        attention.w_kc.normal_(0, 1 / math.sqrt(attention.w_kc.shape[-2]))
        attention.w_vc.normal_(0, 1 / math.sqrt(attention.w_vc.shape[-2]))
    for buffer in runner.token_to_kv_pool.kv_buffer:
        buffer.normal_()


def fill_weight(name: str, weight: torch.Tensor) -> None:
    """Fill one parameter in place by its role."""
    if "weight_packed" in name:
        # INT4: any bit pattern is a valid weight.
        weight.random_(*((0, 256) if weight.dtype == torch.uint8 else (-(2**31), 2**31 - 1)))
    elif not weight.is_floating_point():
        return
    elif "norm" in name:
        weight.fill_(1.0)
    elif "correction_bias" in name:
        weight.zero_()
    elif name.endswith("weight_scale"):
        weight.uniform_(0.5 * INT4_STEP, 1.5 * INT4_STEP)
    elif "embed_tokens" in name:
        weight.normal_()
    elif weight.dim() >= 2 and weight.shape[-1] > 2:
        gain = BRANCH_GAIN if "o_proj" in name or "down_proj" in name or "w2_" in name else 1.0
        weight.normal_(0, gain / math.sqrt(weight.shape[-1]))
