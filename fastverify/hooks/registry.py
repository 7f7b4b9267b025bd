"""Registering hooks with SGLang and proving afterwards that each one took effect.

SGLang logs a failing plugin or hook and serves on without it. An overlay that is silently absent
is worse than none, so a missing hook ends the process.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


class Hook(NamedTuple):
    """A target (dotted path), our function, and how it wraps the original."""

    target: str
    function: Callable[..., Any]
    kind: HookType


def install(hooks: Sequence[Hook], refuse: Callable[[str], None]) -> None:
    """Register hooks; `refuse(sentence)` is called when SGLang did not apply one of them.

    SGLang applies hooks once all plugins have run, so the check is tied to that moment.
    """
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, hook.kind)
    apply_hooks = HookRegistry.apply_hooks

    def apply_and_check() -> None:
        HookRegistry.apply_hooks = apply_hooks
        apply_hooks()
        missing = [hook.target for hook in hooks if not took_effect(hook)]
        if missing:
            refuse(
                f"SGLang did not take the hook on {', '.join(missing)}, which fastverify"
                " needs: install the pinned SGLang again, or set FASTVERIFY_DISABLE=1."
            )

    HookRegistry.apply_hooks = apply_and_check


def took_effect(hook: Hook) -> bool:
    """True when calling the target now goes through our function."""
    try:
        current = pkgutil.resolve_name(hook.target)
    except (AttributeError, ImportError):
        return False
    while current is not None:
        cells = [cell.cell_contents for cell in getattr(current, "__closure__", None) or ()]
        if current is hook.function or hook.function in cells:
            return True
        current = getattr(current, "__wrapped__", None)
    return False
