"""One observation about a machine or its environment."""

from __future__ import annotations

from typing import Literal

import msgspec

Severity = Literal["info", "warn", "fail", "unknown"]


class Finding(msgspec.Struct, frozen=True):
    """What was noticed, in one sentence that holds the value and what to do about it.

    `code` is a stable word for tests, filters and JSON readers; `source` names the report (R..) or
    the section of the facts it rests on. `unknown` means that a fact needed for an answer is
    missing: it is neither good nor bad news.
    """

    severity: Severity
    code: str
    text: str
    source: str = ""
