"""Runs `python -m fastverify.launch --model tiny` as a child that cannot outlive its test."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from fastverify.tiny.build import build_tiny

READY_TIMEOUT_S = 400.0
REQUEST_TIMEOUT_S = 120.0
# Past this the server is ended by `timeout`, even if pytest itself was killed.
LIFE_S = 900


def drafter_flags() -> tuple[str, ...]:
    """SGLang's Llama MLP needs CuTe DSL on a GPU; without it the MLA drafter serves."""
    if importlib.util.find_spec("cutlass") is not None:
        return ()
    return ("--draft", str(build_tiny(drafter="mla").draft))


def free_port() -> int:
    """A port nobody listens on now, below those that the system hands to outgoing connections.

    A server binds its port half a minute after it was chosen; one of the others would be taken by
    then now and again, since every server opens dozens of connections within itself.
    """
    for port in random.sample(range(20000, 32000), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port among 50 tried between 20000 and 32000")


class Server:
    """One launcher and everything it starts, in a process group of their own."""

    def __init__(
        self,
        folder: pathlib.Path,
        *flags: str,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.log_path = folder / f"server-{self.port}.log"
        command = ["timeout", "--kill-after=10", str(LIFE_S)]
        command += [sys.executable, "-m", "fastverify.launch", "--model", "tiny"]
        command += ["--port", str(self.port), *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | dict(environment or {}),
                start_new_session=True,
            )
        atexit.register(self.stop)

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def log(self) -> str:
        """Everything the server has printed so far."""
        return self.log_path.read_text(errors="replace")

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> Server:
        """Return when the launcher says it serves; raise with its last words if it does not."""
        deadline = time.monotonic() + timeout_s
        while f"ready on http://127.0.0.1:{self.port}/v1" not in self.log:
            if self.process.poll() is not None:
                raise RuntimeError(
                    f"the server left with {self.process.returncode}: {self._tail()}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server is not ready after {timeout_s} s: {self._tail()}")
            time.sleep(0.5)
        return self

    def wait_exit(self, timeout_s: float = READY_TIMEOUT_S) -> int:
        """Exit code of a server that must not start."""
        return self.process.wait(timeout_s)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """One JSON request; raises with the server's answer for a status other than 200."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.code} {error.read()!r}") from error

    def generate(self, prompts: Sequence[str], tokens: int, **sampling: Any) -> list[Any]:
        """Greedy answers of SGLang's own endpoint, all prompts in one request."""
        settings = {"temperature": 0, "max_new_tokens": tokens} | sampling
        return list(self.post("/generate", {"text": list(prompts), "sampling_params": settings}))

    def group(self) -> list[int]:
        """Processes of the group that are still running."""
        found = []
        for status in pathlib.Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                # The name in parentheses may hold spaces; state, parent and group follow it.
                state, _, group = status.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self.process.pid and state != "Z":
                    found.append(int(status.parent.name))
        return found

    def stop(self, grace_s: float = 2.0) -> None:
        """End the whole group: politely first, then for certain."""
        atexit.unregister(self.stop)
        for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            deadline = time.monotonic() + patience_s
            if self.group():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.process.pid, number)
            while self.group() and time.monotonic() < deadline:
                self.process.poll()
                time.sleep(0.1)
        self.process.wait(5)

    def _tail(self) -> str:
        return self.log[-3000:]
