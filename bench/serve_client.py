"""Generate through a remote SGLang or vLLM server, and time it."""

from __future__ import annotations

import concurrent.futures
import json
import time
import urllib.error
import urllib.request
from typing import Any, NamedTuple

from bench.serve_counters import Counters, read_counters
from fastverify.errors import ConfigError

TIMEOUT_S = 600

Prompt = str | list[int]


class Generation(NamedTuple):
    """One timed batch. tokens: generated in all; prompt_tokens: of the longest prompt."""

    seconds: float
    tokens: int
    prompt_tokens: int


class RemoteServer:
    """A server reached over HTTP, through the OpenAI routes that both servers have."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        models = self.request("/v1/models")["data"]
        self.model = models[0]["id"]

    def request(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """GET, or POST body as JSON; the decoded answer."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=data, headers={"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                raw = answer.read()
        except (urllib.error.URLError, TimeoutError, ValueError) as error:
            raise ConfigError(f"no answer from {self.url}{path} ({error}): check --url.") from error
        return json.loads(raw) if path != "/metrics" else raw.decode()

    def complete(self, prompt: Prompt, tokens: int) -> tuple[int, int]:
        """Generate exactly `tokens` greedy tokens; (generated, prompt tokens)."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        if isinstance(prompt, str):
            body["messages"] = [{"role": "user", "content": prompt}]
            usage = self.request("/v1/chat/completions", body)["usage"]
        else:
            usage = self.request("/v1/completions", {**body, "prompt": prompt})["usage"]
        return usage["completion_tokens"], usage["prompt_tokens"]

    def generate(self, prompts: list[Prompt], tokens: int) -> Generation:
        """All prompts at once, timed from the first request to the last answer."""
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: self.complete(prompt, tokens), prompts))
        seconds = time.perf_counter() - start
        return Generation(seconds, sum(a[0] for a in answers), max(a[1] for a in answers))

    def counters(self) -> Counters:
        """The server's counters now."""
        return read_counters(self.request("/metrics"))

    def close(self) -> None:
        """Nothing to release."""
