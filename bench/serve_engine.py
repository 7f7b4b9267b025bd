"""One SGLang engine of one configuration, in a process of its own.

`bench.serve` starts `python -m bench.serve_engine CONFIG` for each configuration, so that one
that fails or hangs costs no other. Each measured cell is one line of output, as it arrives.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from typing import Any

import msgspec

from bench.serve_client import Generation, Prompt
from bench.serve_counters import Counters, read_counters
from bench.serve_measure import measure
from bench.serve_prompts import SETS, token_prompt

CELL = "CELL "
SIMULATE = "SGLANG_SIMULATE_ACC_LEN"
OURS = "fastverify"


class EngineConfig(msgspec.Struct, frozen=True):
    """Everything one engine needs; drafts 0 is no speculation."""

    model: str
    draft: str
    dummy: bool
    drafts: int
    accept: float | None
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    tokens: int
    repeats: int
    attention: str
    moe: str
    device: str
    vocabulary: int
    prompts: str
    tp: int


def environment(config: EngineConfig) -> dict[str, str]:
    """What an engine's processes read before SGLang is imported.

    Our plugin is switched off unless the attention is ours, so that a baseline is SGLang alone.
    """
    out = {"FASTVERIFY_DISABLE": "1"}
    if config.attention == OURS:
        out = {"FASTVERIFY_ATTENTION": "verify"}
    if config.drafts and config.accept is not None:
        out[SIMULATE] = str(config.accept)
    if config.device == "cpu":
        out |= {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    return out


def engine_settings(config: EngineConfig) -> dict[str, Any]:
    """SGLang engine arguments of one configuration."""
    on_gpu = config.device == "cuda"
    longest = max(config.contexts) + config.tokens + 64
    settings: dict[str, Any] = {
        "model_path": config.model,
        "device": config.device,
        "tp_size": config.tp,
        "attention_backend": "triton" if config.attention == OURS else config.attention,
        "moe_runner_backend": config.moe,
        "context_length": longest,
        "max_running_requests": max(8, *config.batches),
        "cuda_graph_max_bs_decode": max(config.batches),
        "enable_metrics": True,
        "log_level": "warning",
    }
    if config.dummy:
        settings |= {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_total_tokens": max(config.batches) * longest + 4096,
            "mem_fraction_static": 0.85 if on_gpu else 0.3,
        }
    settings |= {"disable_prefill_cuda_graph": True} if on_gpu else {"disable_cuda_graph": True}
    if config.drafts:
        settings |= {
            "speculative_algorithm": "EAGLE3",
            "speculative_draft_model_path": config.draft,
            "speculative_num_steps": config.drafts,
            "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": config.drafts + 1,
        }
        if config.dummy:
            settings["speculative_draft_load_format"] = "dummy"
        if config.attention == "flashinfer":
            # An MLA drafter's draft-extend is never captured with FlashInfer's backend.
            settings["speculative_draft_attention_backend"] = "triton"
    return settings


class LocalEngine:
    """An engine in this process, with its counters read from its metrics files."""

    def __init__(self, config: EngineConfig, metrics_folder: str) -> None:
        import sglang

        self.metrics_folder = metrics_folder
        self.engine = sglang.Engine(**engine_settings(config))

    def generate(self, prompts: list[Prompt], tokens: int) -> Generation:
        """All prompts as one batch of greedy requests of exactly `tokens` tokens."""
        sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
        start = time.perf_counter()
        if isinstance(prompts[0], str):
            answers = self.engine.generate(prompt=prompts, sampling_params=sampling)
        else:
            answers = self.engine.generate(input_ids=prompts, sampling_params=sampling)
        seconds = time.perf_counter() - start
        meta = [answer["meta_info"] for answer in answers]
        return Generation(
            seconds,
            sum(m["completion_tokens"] for m in meta),
            max(m["prompt_tokens"] for m in meta),
        )

    def counters(self) -> Counters:
        """Counters of every process of the engine."""
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.multiprocess import MultiProcessCollector

        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=self.metrics_folder)
        return read_counters(generate_latest(registry).decode())

    def close(self) -> None:
        """Stop the engine's processes."""
        self.engine.shutdown()


def prompt_sets(config: EngineConfig) -> list[tuple[str, list[Prompt]]]:
    """(label, prompts) of every cell: texts one by one or in batches, or ids by context."""
    if config.prompts != "tokens":
        texts = SETS[config.prompts]
        return [
            (config.prompts, [texts[i % len(texts)] for i in range(start, start + batch)])
            for batch in config.batches
            for start in range(0, len(texts), batch)
        ]
    return [
        ("tokens", [token_prompt(context, i, config.vocabulary) for i in range(batch)])
        for context in config.contexts
        for batch in config.batches
    ]


def main() -> int:
    """Serve every cell of the configuration given as JSON; one output line each."""
    config = msgspec.json.decode(sys.argv[1], type=EngineConfig)
    with tempfile.TemporaryDirectory(prefix="fastverify-metrics-") as folder:
        # Read when prometheus_client is first imported, here and in the engine's processes.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        start = time.monotonic()
        server = LocalEngine(config, folder)
        print(f"started after {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
        try:
            for label, prompts in prompt_sets(config):
                served = measure(
                    server,
                    prompts,
                    tokens=config.tokens,
                    repeats=config.repeats,
                    drafts=config.drafts,
                    simulated=config.accept if config.drafts else None,
                    label=label,
                )
                print(CELL + json.dumps(msgspec.to_builtins(served)), flush=True)
        finally:
            server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
