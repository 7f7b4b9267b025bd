"""What the command lines of the benches share: lists, errors, progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from fastverify.errors import ConfigError

Item = TypeVar("Item")


def int_list(text: str, what: str, least: int, most: int) -> tuple[int, ...]:
    """Parse `1,2,3`; ConfigError names the option, the value and the range."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or any(not least <= n <= most for n in numbers):
        raise ConfigError(
            f"{what} {text!r}: give whole numbers from {least} to {most}, separated by commas."
        )
    return numbers


def float_list(text: str, what: str, least: float, most: float) -> tuple[float, ...]:
    """Parse `1.5,2`; ConfigError names the option, the value and the range."""
    try:
        numbers = tuple(float(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or any(not least <= n <= most for n in numbers):
        raise ConfigError(
            f"{what} {text!r}: give numbers from {least:g} to {most:g}, separated by commas."
        )
    return numbers


def name_list(text: str, what: str, known: Sequence[str]) -> tuple[str, ...]:
    """Parse names separated by commas; ConfigError lists the known ones."""
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"{what} {unknown[0]!r} is unknown: it takes {', '.join(known)}.")
    return names


def run(main: Callable[[], int]) -> None:
    """Run main and exit with its code; bad input is one sentence on stderr and code 2."""
    try:
        code = main()
    except ConfigError as error:
        print(error, file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; what was measured so far is written.", file=sys.stderr)
        code = 130
    sys.exit(code)


def progress(items: Iterable[Item], label: Callable[[Item], str], total: int) -> Iterator[Item]:
    """Yield items under a progress bar, or with one plain line each when piped."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            for item in items:
                bar.update(task, description=label(item))
                yield item
                bar.advance(task)
        return
    start = time.monotonic()
    for done, item in enumerate(items, 1):
        print(f"[{done}/{total} {time.monotonic() - start:5.0f} s] {label(item)}", file=sys.stderr)
        yield item
