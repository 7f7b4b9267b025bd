"""Counters of both servers, and the measuring client against a fake server on a local port."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from bench import serve
from bench.serve_client import Generation, RemoteServer
from bench.serve_counters import acceptance, read_counters
from bench.serve_engine import EngineConfig, engine_settings, environment, prompt_sets
from bench.serve_measure import Served, decode_tok_s, measure, summary
from bench.serve_prompts import token_prompt
from fastverify.errors import ConfigError

# Recorded from SGLang 0.5.23 with EAGLE-3, two drafts, cut to the families that matter: a request
# of two tokens and one of one token before, and one of sixteen tokens after.
SGLANG = """\
# HELP sglang:generation_tokens_total Number of generation tokens processed.
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{engine_type="unified",is_streaming="false",model_name="tiny"}} {0}
# HELP sglang:spec_verify_calls_total Number of speculative decoding verification calls.
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{{engine_type="unified",model_name="tiny"}} {1}
# HELP sglang:num_requests_total Number of requests processed.
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{engine_type="unified",is_streaming="false",model_name="tiny"}} {2}
# HELP sglang:cuda_graph_passes_total Total number of forward passes categorized by CUDA graph.
# TYPE sglang:cuda_graph_passes_total counter
sglang:cuda_graph_passes_total{{mode="prefill_none",model_name="tiny",tp_rank="0"}} {2}
sglang:cuda_graph_passes_total{{mode="decode_none",model_name="tiny",tp_rank="0"}} {3}
sglang:cuda_graph_passes_total{{mode="decode_cuda_graph",model_name="tiny",tp_rank="0"}} {4}
# HELP sglang:spec_accept_length The average acceptance length of speculative decoding.
# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{engine_type="unified",model_name="tiny",tp_rank="0"}} 7.5
"""

# Written in the format that vLLM documents; no vLLM ran here.
VLLM = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {0}
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {1}
# HELP vllm:spec_decode_num_draft_tokens_total Number of draft tokens.
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {2}
# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {3}
# HELP vllm:request_success_total Count of successfully processed requests.
# TYPE vllm:request_success_total counter
vllm:request_success_total{{engine="0",finished_reason="length",model_name="m"}} {4}
"""


def test_sglang_counters_give_the_accept_length_and_the_eager_steps() -> None:
    before = read_counters(SGLANG.format(3, 1, 2, 1, 0))
    # 100 tokens of one request: the first from prefill, 99 from 45 verify steps.
    after = read_counters(SGLANG.format(103, 46, 3, 3, 43))
    seen = acceptance(before, after, drafts=2)
    assert seen.steps == 45
    assert seen.length == pytest.approx(99 / 45)
    assert seen.rate == pytest.approx((99 - 45) / 90)
    assert seen.eager_steps == 2


def test_the_recorded_reading() -> None:
    seen = acceptance(
        read_counters(SGLANG.format(3, 1, 2, 1, 0)),
        read_counters(SGLANG.format(19, 16, 3, 16, 0)),
        drafts=2,
    )
    assert (seen.steps, seen.length, seen.rate, seen.eager_steps) == (15, 1.0, 0.0, 15)


def test_vllm_counters_give_the_same_numbers_for_the_same_work() -> None:
    before = read_counters(VLLM.format(3, 1, 2, 0, 2))
    after = read_counters(VLLM.format(103, 46, 92, 54, 3))
    seen = acceptance(before, after)
    assert seen.length == pytest.approx(99 / 45)
    assert seen.rate == pytest.approx(54 / 90)
    assert seen.eager_steps is None


def test_without_speculation_there_is_no_accept_length() -> None:
    plain = [read_counters(SGLANG.format(tokens, 0, 2, 0, tokens)) for tokens in (3, 103)]
    assert acceptance(*plain).length is None
    assert acceptance(*plain).eager_steps == 0


def test_a_page_of_neither_server() -> None:
    with pytest.raises(ConfigError, match="--enable-metrics"):
        read_counters("# TYPE up gauge\nup 1\n")


def test_decode_speed_leaves_out_prefill_and_the_first_token() -> None:
    first, whole = Generation(0.5, 4, 100), Generation(2.5, 404, 100)
    assert decode_tok_s(whole, first, batch=4) == pytest.approx(400 / 2.0)


class FakeServer(http.server.BaseHTTPRequestHandler):
    """Answers the OpenAI routes; every verify step accepts one of two drafts."""

    state: ClassVar[dict[str, float]] = {}

    def do_GET(self) -> None:
        s = self.state
        if self.path == "/v1/models":
            self.answer(json.dumps({"data": [{"id": "m"}]}))
        else:
            self.answer(SGLANG.format(s["tokens"], s["steps"], s["requests"], 0, s["steps"]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = body["max_tokens"]
        assert body["temperature"] == 0
        self.state["tokens"] += tokens
        self.state["requests"] += 1
        self.state["steps"] += (tokens - 1) / 2
        prompt = len(body["prompt"]) if "prompt" in body else 9
        self.answer(json.dumps({"usage": {"completion_tokens": tokens, "prompt_tokens": prompt}}))

    def answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    FakeServer.state = {"tokens": 0.0, "requests": 0.0, "steps": 0.0}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)


def test_a_remote_server_is_measured_by_its_counters(url: str) -> None:
    server = RemoteServer(url + "/")
    prompts: list[Any] = [token_prompt(64, i, 1000) for i in range(2)]
    served = measure(
        server, prompts, tokens=21, repeats=2, drafts=2, simulated=None, label="tokens"
    )
    assert (served.context, served.batch) == (64, 2)
    assert served.accept_length == pytest.approx(2.0)
    assert served.accept_rate == pytest.approx(0.5)
    assert served.tok_s > 0
    assert served.iteration_ms == pytest.approx(1000 * 2.0 * 2 / served.tok_s)
    texts: list[Any] = ["question"]
    assert server.generate(texts, 4).prompt_tokens == 9


def test_a_server_that_does_not_answer() -> None:
    with pytest.raises(ConfigError, match="check --url"):
        RemoteServer("http://127.0.0.1:9")


def engine_config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "model": "m", "draft": "d", "dummy": True, "drafts": 2, "accept": 2.0,
        "contexts": (512, 4096), "batches": (1, 4), "tokens": 128, "repeats": 1,
        "attention": "flashinfer", "moe": "auto", "device": "cuda", "vocabulary": 20480,
        "prompts": "tokens", "tp": 1,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


def test_engine_settings_of_a_speculative_and_a_plain_engine() -> None:
    settings = engine_settings(engine_config())
    assert settings["speculative_num_draft_tokens"] == settings["speculative_num_steps"] + 1 == 3
    assert settings["speculative_draft_attention_backend"] == "triton"
    assert settings["max_total_tokens"] >= 4 * (4096 + 128)
    assert settings["context_length"] >= 4096 + 128
    plain = engine_settings(engine_config(drafts=0))
    assert not any(key.startswith("speculative") for key in plain)


def test_a_baseline_runs_without_our_plugin_and_ours_inside_triton() -> None:
    assert environment(engine_config())["FASTVERIFY_DISABLE"] == "1"
    assert environment(engine_config())["SGLANG_SIMULATE_ACC_LEN"] == "2.0"
    assert "SGLANG_SIMULATE_ACC_LEN" not in environment(engine_config(drafts=0))
    ours = engine_config(attention="fastverify")
    assert "FASTVERIFY_DISABLE" not in environment(ours)
    assert environment(ours)["FASTVERIFY_ATTENTION"] == "verify"
    assert engine_settings(ours)["attention_backend"] == "triton"
    assert environment(engine_config(device="cpu"))["SGLANG_USE_CPU_ENGINE"] == "1"


def test_prompt_sets_cover_contexts_and_texts() -> None:
    ids = prompt_sets(engine_config())
    assert [(len(p), len(p[0])) for _, p in ids] == [(1, 512), (4, 512), (1, 4096), (4, 4096)]
    assert ids[1][1][0] != ids[1][1][1]
    assert all(0 <= token < 20480 for token in ids[0][1][0])
    texts = prompt_sets(engine_config(prompts="long", batches=(1,)))
    assert len(texts) == 5


def test_summary_names_the_imposed_length_or_the_seen_one() -> None:
    cell = Served(512, 1, 2, 150.0, 13.3, 1.97, 0.485, 0.0, 2.0, "tokens")
    numbers = summary([cell])
    assert numbers["tok_s.ctx512.batch1.draft2.accept2"] == 150.0
    assert numbers["accept_length.ctx512.batch1.draft2.accept2"] == 1.97
    real = Served(512, 1, 2, 150.0, 13.3, 1.97, 0.485, 0.0, None, "long")
    assert "tok_s.ctx512.batch1.draft2.accept1.97" in summary([real])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--model", "tiny", "--url", "http://h"], "give one of"),
        (["--prompts", "long"], "needs real weights"),
        (["--drafts", "-1"], "--drafts '-1'"),
        (["--accept", "0.5"], "--accept '0.5'"),
        (["--tokens", "2"], "--tokens"),
        (["--contexts", "x"], "--contexts 'x'"),
    ],
)
def test_bad_input_is_one_sentence(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        serve.parse(argv)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
