"""Entry point of group `sglang.srt.plugins`: SGLang calls register() in each of its processes."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import sys
from typing import NoReturn

from fastverify import env, reports

SGLANG = "0.5.23"


def register() -> None:
    """Register our hooks in scheduler processes, and prove that they took effect.

    Ends the process with exit code 2 and one sentence when that fails: SGLang itself would log
    the failure and serve on without us.
    """
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        # Part of running SGLang on a CPU at all, so also there when our hooks are switched off.
        from fastverify.hooks import cpu

        cpu.install()
    if env.disabled() or not in_scheduler():
        return
    installed = importlib.metadata.version("sglang")
    if installed != SGLANG:
        refuse(
            f"SGLang {installed} is installed, and this fastverify is made for {SGLANG} only:"
            f" install sglang=={SGLANG}, or set FASTVERIFY_DISABLE=1."
        )
    from fastverify.hooks import all_hooks, registry

    registry.install(all_hooks(env.run_dir(), os.environ), refuse)


def in_scheduler() -> bool:
    """True in a scheduler process: hooks import what they patch, and only it has that loaded."""
    child = multiprocessing.parent_process() is not None
    frame = sys._getframe()
    while child and frame is not None:
        if frame.f_code.co_name == "run_scheduler_process":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def refuse(sentence: str) -> NoReturn:
    """Leave the sentence for the launcher, print it, and end this process with exit code 2."""
    folder = env.run_dir()
    if folder is not None and folder.is_dir():
        reports.write(folder, f"failure-{os.getpid()}.json", reports.Failure(sentence))
    print(f"fastverify: {sentence}", file=sys.stderr, flush=True)
    # Not an Exception: SGLang catches and logs those.
    raise SystemExit(2)
