"""The launch plan as a value: every SGLang argument and variable, and one clause why."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from typing import Literal

import msgspec

from fastverify.graphs import CapturePlan
from fastverify.machine.finding import Finding

# "sglang": what SGLang sets itself, shown because it matters, never set by us.
Source = Literal["user", "preset", "machine", "fastverify", "sglang"]


class Line(msgspec.Struct, frozen=True):
    """One argument (name without dashes) or variable. An empty value is a switch."""

    name: str
    value: str
    reason: str
    source: Source = "fastverify"


class LaunchPlan(msgspec.Struct, frozen=True):
    """What `fastverify` starts SGLang with. Equal inputs give equal plans."""

    title: str
    machine: str
    arguments: tuple[Line, ...]
    environment: tuple[Line, ...]
    graphs: CapturePlan
    findings: tuple[Finding, ...] = ()
    draft_lengths: tuple[int, ...] = ()

    def argv(self) -> list[str]:
        """The SGLang command line. Values that hold several tokens are split again."""
        tokens: list[str] = []
        for line in self.arguments:
            tokens.append(f"--{line.name}")
            # A user's value is one token unless they gave several; JSON may hold spaces.
            tokens += shlex.split(line.value) if line.value else []
        return tokens

    def variables(self) -> dict[str, str]:
        """What to put into the environment; the user's and SGLang's own stay as they are."""
        return {v.name: v.value for v in self.environment if v.source not in ("user", "sglang")}

    def value(self, name: str) -> str | None:
        """Value of an argument in the plan, None when it is not set."""
        return next((line.value for line in self.arguments if line.name == name), None)


def merge(planned: Iterable[Line], given: Iterable[Line]) -> tuple[Line, ...]:
    """User lines win over planned ones of the same name, and say what they replaced."""
    ours = {line.name: line for line in planned}
    merged: list[Line] = []
    for line in given:
        replaced = ours.pop(line.name, None)
        if replaced and replaced.value != line.value:
            was = replaced.value or "the switch"
            reason = f"yours; the plan had {was}: {replaced.reason}"
        else:
            reason = line.reason
        merged.append(msgspec.structs.replace(line, reason=reason))
    return (*ours.values(), *merged)
