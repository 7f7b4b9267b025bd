"""What every refusal must look like to the person who reads it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from fastverify.errors import ConfigError


def check_refused(
    call: Callable[..., Any], *args: Any, says: tuple[object, ...], **named: Any
) -> str:
    """Call, expect ConfigError, and check that its message is one sentence holding `says`."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **named)
    message = str(caught.value)
    assert message == " ".join(message.split()), "one line, single spaces"
    assert message.endswith((".", "?")), "a whole sentence"
    assert not re.search(r"[.!?]\s", message), "one sentence only"
    for part in says:
        assert re.search(rf"(?<!\w){re.escape(str(part))}(?!\w)", message), (part, message)
    return message
