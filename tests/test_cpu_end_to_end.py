"""The real SGLang on the CPU through our launcher and plugin: the same text in every way to run it.

Each class starts its servers together and ends them before the next one; all answers are compared
with transformers, which shares no code with the servers but the files of the model.
"""

from __future__ import annotations

import collections
import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from fastverify.tiny.build import build_tiny
from tests.engine import Server

pytestmark = pytest.mark.engine

PROMPTS = (
    "Where is the water in the river?",
    "Once upon a time there was a small boat on the sea and",
    "The",
    "na\u00efve caf\u00e9\n",
)
TOKENS = 40
OFF = ("--fastverify-speculation", "off")
TWO_RANKS = ("--tp-size", "2")


@pytest.fixture(scope="module")
def reference() -> list[list[int]]:
    """Greedy tokens of transformers in fp32, one prompt at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = build_tiny().target
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        made = model.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False)
        answers.append(made[0, ids.shape[1] :].tolist())
    return answers


class Servers:
    """Servers that are started at the same time, since most of a start is imports."""

    def __init__(
        self,
        folder: pathlib.Path,
        environment: Mapping[str, Mapping[str, str]] | None = None,
        **flags: tuple[str, ...],
    ) -> None:
        variables = environment or {}
        with contextlib.ExitStack() as stack:
            self.servers = {
                name: stack.enter_context(Server(folder, *given, environment=variables.get(name)))
                for name, given in flags.items()
            }
            for server in self.servers.values():
                server.wait_ready()
            self.answers = {
                name: server.generate(PROMPTS, TOKENS) for name, server in self.servers.items()
            }
            self._open = stack.pop_all()

    def tokens(self, name: str) -> list[list[int]]:
        return [answer["output_ids"] for answer in self.answers[name]]

    def histogram(self, name: str) -> collections.Counter[int]:
        """Verify steps by accepted drafts, over all prompts."""
        counts: collections.Counter[int] = collections.Counter()
        for answer in self.answers[name]:
            counts.update(dict(enumerate(answer["meta_info"]["spec_correct_drafts_histogram"])))
        return counts

    def close(self) -> None:
        self._open.close()


class TestOneRank:
    @pytest.fixture(scope="class")
    def pair(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
        made = Servers(tmp_path_factory.mktemp("one-rank"), eagle=(), plain=OFF)
        yield made
        made.close()

    @pytest.fixture
    def client(self, pair: Servers) -> Any:
        import openai

        base = f"http://127.0.0.1:{pair.servers['eagle'].port}/v1"
        return openai.OpenAI(base_url=base, api_key="none", timeout=60, max_retries=0)

    def test_both_answer_as_transformers_does(
        self, pair: Servers, reference: list[list[int]]
    ) -> None:
        assert pair.tokens("plain") == reference
        assert pair.tokens("eagle") == reference

    def test_accepted_drafts_are_none_to_three(self, pair: Servers) -> None:
        counts = pair.histogram("eagle")
        assert all(counts[accepted] >= 3 for accepted in range(4)), counts
        assert "spec_verify_ct" not in pair.answers["plain"][0]["meta_info"]

    def test_a_cached_prefix_and_a_lone_request_change_nothing(
        self, pair: Servers, reference: list[list[int]]
    ) -> None:
        for server in pair.servers.values():
            again = [server.generate([prompt], TOKENS)[0] for prompt in PROMPTS]
            assert [answer["output_ids"] for answer in again] == reference
            assert any(answer["meta_info"]["cached_tokens"] > 0 for answer in again)

    def test_completions_of_an_openai_client(self, pair: Servers, client: Any) -> None:
        made = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=PROMPTS[0],
            max_tokens=TOKENS,
            temperature=0,
        )
        assert made.choices[0].text == pair.answers["plain"][0]["text"]
        assert made.usage.completion_tokens == TOKENS

    def test_chat_of_an_openai_client(self, pair: Servers, client: Any) -> None:
        question = {"role": "user", "content": "Where is the boat?"}
        model = client.models.list().data[0].id
        made = client.chat.completions.create(
            model=model, messages=[question], max_tokens=16, temperature=0
        )
        templated = "<|bos|><|user|>Where is the boat?<|end|><|assistant|>"
        expected = pair.servers["plain"].generate([templated], 16)[0]
        assert made.choices[0].message.content == expected["text"]
        assert made.usage.prompt_tokens == expected["meta_info"]["prompt_tokens"]
        streamed = client.chat.completions.create(
            model=model, messages=[question], max_tokens=16, temperature=0, stream=True
        )
        parts = [chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices]
        assert "".join(parts) == expected["text"]

    def test_sampling_is_said_to_be_greedy(self, pair: Servers) -> None:
        assert "verifies greedily at any temperature" in pair.servers["eagle"].log
        assert "a request asks for sampling" not in pair.servers["eagle"].log
        pair.servers["eagle"].generate(PROMPTS[:1], 8, temperature=1.0)
        assert "a request asks for sampling" in pair.servers["eagle"].log


class TestTwoRanks:
    @pytest.fixture(scope="class")
    def pair(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
        made = Servers(tmp_path_factory.mktemp("two-ranks"), eagle=TWO_RANKS, plain=TWO_RANKS + OFF)
        yield made
        made.close()

    def test_both_answer_as_transformers_does(
        self, pair: Servers, reference: list[list[int]]
    ) -> None:
        assert pair.tokens("plain") == reference
        assert pair.tokens("eagle") == reference

    def test_accepted_drafts_are_none_to_three(self, pair: Servers) -> None:
        counts = pair.histogram("eagle")
        assert all(counts[accepted] >= 3 for accepted in range(4)), counts


class TestSwitches:
    @pytest.fixture(scope="class")
    def broken(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        folder = tmp_path_factory.mktemp("broken")
        with Server(folder, environment={"FASTVERIFY_TEST_BREAK_HOOK": "1"}) as server:
            yield server

    @pytest.fixture(scope="class")
    def pair(self, broken: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
        made = Servers(
            tmp_path_factory.mktemp("switches"),
            {"disabled": {"FASTVERIFY_DISABLE": "1"}},
            disabled=(),
            latent=("--draft", str(build_tiny(drafter="mla").draft)),
        )
        yield made
        made.close()

    def test_the_plugin_switched_off_gives_the_same_text(
        self, pair: Servers, reference: list[list[int]]
    ) -> None:
        assert pair.tokens("disabled") == reference
        assert "not active (FASTVERIFY_DISABLE=1)" in pair.servers["disabled"].log

    def test_the_latent_drafter_gives_the_same_text_and_acceptance(
        self, pair: Servers, reference: list[list[int]]
    ) -> None:
        """Both drafters compute the same thing through different attention."""
        assert pair.tokens("latent") == reference
        assert pair.histogram("latent") == pair.histogram("disabled")

    def test_a_broken_hook_stops_the_start(self, broken: Server) -> None:
        assert broken.wait_exit() == 2, broken.log
        said = [line for line in broken.log.splitlines() if line.startswith("fastverify: ")]
        assert said and "hook" in said[-1], broken.log
        assert "ready on" not in broken.log
        assert broken.group() == []


def test_stopping_a_server_leaves_no_process(tmp_path: pathlib.Path) -> None:
    server = Server(tmp_path)
    group = server.process.pid
    assert server.group()
    server.stop()
    assert server.group() == []
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)
