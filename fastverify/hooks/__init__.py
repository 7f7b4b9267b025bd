"""The only package that imports `sglang`. `all_hooks()` lists everything we change in it."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastverify.hooks.registry import Hook


def all_hooks(folder: pathlib.Path | None, environ: Mapping[str, str]) -> tuple[Hook, ...]:
    """Every hook of a scheduler process. folder: the run folder, None outside our launcher."""
    from sglang.srt.plugins.hook_registry import HookType

    from fastverify import env
    from fastverify.hooks import status, verify
    from fastverify.hooks.registry import Hook

    hooks = verify.VerifyObserver(folder).hooks()
    kernel = None
    chosen = environ.get("FASTVERIFY_ATTENTION", "")
    if chosen:
        from fastverify.hooks.attention import VerifyAttention

        kernel = VerifyAttention(decode=chosen == "verify+decode")
        hooks += kernel.hooks()
    if env.flag("FASTVERIFY_TEST_BREAK_HOOK", environ):
        hooks += (Hook("sglang.srt.managers.scheduler.no_such_name", print, HookType.AFTER),)
    return (*hooks, status.hook(folder, tuple(hook.target for hook in hooks), kernel))
