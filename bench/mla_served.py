"""Served iteration time by attention backend and context, on a 6-layer MLA model.

    python -m bench.mla_served --backends fastverify,triton,flashinfer --contexts 512,4096

One engine per backend, each in its own process with a time limit; dummy weights, batch 1, three
drafts, accept length simulated at 2.0. An iteration is draft, verify, draft-extend and all host
time between: (time of 129 tokens - time of 1 token) / verify steps. `nospec` is plain decode.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

from bench import cli, harness

BACKENDS = ("fastverify", "triton", "flashinfer", "nospec", "nospec-triton")
TARGET: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "routed_scaling_factor": 2.827,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 65536,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LEFT_OUT = ("first_k_dense_replace", "moe_layer_freq", "n_group", "topk_group")
DRAFT = {k: v for k, v in TARGET.items() if k not in LEFT_OUT and "expert" not in k} | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "model_type": "kimi_k2",
    "num_hidden_layers": 1,
    "draft_vocab_size": 32768,
    "target_hidden_size": 1024,
    "eagle_config": {
        "use_aux_hidden_state": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
    },
}


def engine_arguments(
    folder: pathlib.Path, backend: str, contexts: tuple[int, ...]
) -> dict[str, Any]:
    """SGLang engine arguments; fastverify lives inside the Triton backend."""
    arguments: dict[str, Any] = {
        "model_path": str(folder / "target"),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "attention_backend": "flashinfer" if backend == "flashinfer" else "triton",
        "mem_fraction_static": 0.5,
        "max_running_requests": 8,
        "context_length": max(contexts) + 1024,
        "chunked_prefill_size": 8192,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": 4,
        "log_level": "warning",
    }
    if not backend.startswith("nospec"):
        arguments |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": str(folder / "draft"),
            "speculative_draft_load_format": "dummy",
            "speculative_num_steps": 3,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": 4,
        }
    return arguments


def write_models(folder: pathlib.Path) -> None:
    """The two config.json files; weights are made up by SGLang."""
    for name, config in (("target", TARGET), ("draft", DRAFT)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))


def serve(backend: str, contexts: tuple[int, ...], repeats: int) -> None:
    """In the child: one engine, one JSON line per context."""
    import sglang

    with tempfile.TemporaryDirectory() as made:
        folder = pathlib.Path(made)
        write_models(folder)
        engine = sglang.Engine(**engine_arguments(folder, backend, contexts))
        for context in contexts:
            samples = [iteration_ms(engine, context, seed) for seed in range(repeats + 1)][1:]
            print("CELL " + json.dumps({"context": context, "ms": samples}), flush=True)
        engine.shutdown()


def iteration_ms(engine: Any, context: int, seed: int) -> float:
    """Time of one iteration at this context; the prompt differs by seed, so it is prefilled."""
    prompt = [(i * 7919 + seed * 104729) % 20000 + 5 for i in range(context)]

    def run(tokens: int) -> tuple[float, int]:
        settings = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        start = time.perf_counter()
        answer = engine.generate(input_ids=[prompt], sampling_params=settings)
        took = time.perf_counter() - start
        meta = (answer[0] if isinstance(answer, list) else answer)["meta_info"]
        return took, int(meta.get("spec_verify_ct") or tokens)

    run(1)  # the prefix is cached from here on
    short, steps_short = run(1)
    long, steps_long = run(129)
    return 1000 * (long - short) / max(1, steps_long - steps_short)


def run_backend(
    backend: str, contexts: tuple[int, ...], repeats: int, seconds: float
) -> dict[int, list[float]]:
    """Run one backend in a process group of its own; what it measured until the limit counts."""
    environment = dict(os.environ, SGLANG_SIMULATE_ACC_LEN="2.0")
    environment["FASTVERIFY_DISABLE"] = "0" if backend in ("fastverify", "nospec") else "1"
    environment["FASTVERIFY_ATTENTION"] = {"fastverify": "verify", "nospec": "verify+decode"}.get(
        backend, ""
    )
    listed = ",".join(map(str, contexts))
    command = [sys.executable, "-m", "bench.mla_served", "--child", backend]
    command += ["--contexts", listed, "--repeats", str(repeats)]
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    cells: dict[int, list[float]] = {}
    timer = threading.Timer(seconds, _end, [child])
    timer.start()
    assert child.stdout is not None
    try:
        for line in child.stdout:
            if line.startswith("CELL "):
                cell = json.loads(line[5:])
                cells[cell["context"]] = cell["ms"]
                print(f"  {backend} ctx {cell['context']}: {statistics.median(cell['ms']):.2f} ms")
    finally:
        # Also when this process is told to stop: an engine left behind keeps the GPU's memory.
        timer.cancel()
        _end(child)
    return cells


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def main() -> int:
    """Measure, print a table, write the result."""
    parser = argparse.ArgumentParser(prog="bench.mla_served", description=__doc__)
    parser.add_argument("--backends", default="fastverify,triton,flashinfer")
    parser.add_argument("--contexts", default="512,4096,16384,32768")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=200, help="limit for each backend")
    parser.add_argument("--results", type=pathlib.Path, default=harness.RESULTS)
    parser.add_argument("--child", choices=BACKENDS)
    args = parser.parse_args()
    contexts = cli.int_list(args.contexts, "--contexts", 16, 1 << 20)
    if args.child:
        serve(args.child, contexts, args.repeats)
        return 0
    backends = cli.name_list(args.backends, "--backends", BACKENDS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    samples = {b: run_backend(b, contexts, args.repeats, args.seconds) for b in backends}
    summary = {
        f"iteration_ms.ctx{context}.{backend}": statistics.median(values)
        for backend, cells in samples.items()
        for context, values in cells.items()
    }
    print(json.dumps(summary, indent=1))
    if summary:
        path = harness.write_result(
            "mla_verify", "served", summary=summary, samples={"iteration_ms": samples},
            folder=args.results,
        )  # fmt: skip
        print(path)
    return 0 if summary else 1


if __name__ == "__main__":
    cli.run(main)
