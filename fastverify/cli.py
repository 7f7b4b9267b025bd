"""The console script `fastverify`: subcommands, or the launcher when none is named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from fastverify import launch
from fastverify.errors import FastverifyError


def main(argv: Sequence[str] | None = None) -> int:
    """Dispatch on the first word."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else ""
    if command in COMMANDS:
        try:
            return COMMANDS[command](arguments[1:])
        except FastverifyError as error:
            print(f"fastverify: {error}", file=sys.stderr)
            return 2
    return launch.main(arguments[1:] if command == "launch" else arguments)


def _machine(arguments: Sequence[str]) -> int:
    from fastverify.machine.record import main as record

    return record(arguments)


def _doctor(arguments: Sequence[str]) -> int:
    from fastverify.doctor.cli import doctor_main

    return doctor_main(arguments)


def _logs(arguments: Sequence[str]) -> int:
    from fastverify.logs.cli import logs_main

    return logs_main(arguments)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "doctor": _doctor,
    "logs": _logs,
    "machine": _machine,
}

if __name__ == "__main__":
    sys.exit(main())
