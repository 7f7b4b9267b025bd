"""Errors that reach a person; each message is one sentence that says what to do next."""

from __future__ import annotations


class FastverifyError(Exception):
    """Base of every error raised on purpose."""


class ConfigError(FastverifyError):
    """Bad input: names what was wrong, the value, the limit and the remedy.

    The launcher prints the message without a stack trace and exits with code 2.
    """


class HookError(FastverifyError):
    """A hook could not be installed or did not take effect; the server must not start."""
