"""What the user asked for: our own flags, and SGLang's flags kept exactly as given."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import msgspec

from fastverify.errors import ConfigError

# Other spellings that SGLang 0.5.23 takes for the flags the plan may set (checked by a test).
ALIASES = {
    "model": "model-path",
    "tp": "tp-size",
    "tensor-parallel-size": "tp-size",
    "speculative-draft-model": "speculative-draft-model-path",
}

Attention = Literal["auto", "fastverify", "flashinfer", "triton"]


class Given(msgspec.Struct, frozen=True):
    """One SGLang flag of the user: canonical name, the tokens that followed it."""

    flag: str
    values: tuple[str, ...] = ()


class Request(msgspec.Struct, frozen=True):
    """A parsed command line. `given` keeps order and repetitions."""

    model: str
    draft: str | None = None
    given: tuple[Given, ...] = ()
    speculation: bool = True
    attention: Attention = "auto"
    profile: Literal["latency", "throughput"] = "latency"
    plan: Literal["", "auto", "json"] = ""
    machine: str | None = None
    debug: bool = False

    def value(self, flag: str) -> str | None:
        """The last value the user gave for a flag; "" for a switch, None when not given."""
        found = [g for g in self.given if g.flag == flag]
        return " ".join(found[-1].values) if found else None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[:1].lower()}{message[1:]}: see `fastverify --help`.")


FLAGS: dict[tuple[str, ...], dict[str, Any]] = {
    ("--model", "--model-path"): {
        "required": True,
        "metavar": "NAME_OR_PATH",
        "help": "a preset (kimi-k2.5, kimi-k2.6, deepseek-v3, glm-5, tiny), a folder or a hub name",
    },
    ("--draft",): {"metavar": "PATH", "help": "EAGLE-3 drafter: a folder or a hub name"},
    ("--plan",): {
        "nargs": "?",
        "const": "auto",
        "default": "",
        "choices": ("auto", "json"),
        "help": "print what would be set and why, and exit; --plan=json for programs",
    },
    ("--machine",): {"metavar": "FILE.json", "help": "plan for a recorded machine (with --plan)"},
    ("--fastverify-speculation",): {
        "choices": ("on", "off"),
        "default": "on",
        "help": "off serves without a drafter",
    },
    ("--fastverify-attention",): {
        "choices": ("auto", "fastverify", "flashinfer", "triton"),
        "default": "auto",
        "help": "attention of MLA verify",
    },
    ("--fastverify-profile",): {
        "choices": ("latency", "throughput"),
        "default": "latency",
        "help": "what NCCL is tuned for: few users or many",
    },
    ("--debug",): {"action": "store_true", "help": "show stack traces"},
}


def parser() -> argparse.ArgumentParser:
    """Our own flags; everything else is handed to SGLang as it stands."""
    made = _Parser(
        prog="fastverify",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Serve a model with SGLang, with speculation that pays on PCIe-only GPUs.",
        epilog="Every other flag goes to SGLang unchanged and wins over the plan.\n"
        "`fastverify machine > FILE.json` records this machine for `--plan --machine FILE.json`,\n"
        "`fastverify doctor` checks it, `fastverify logs FILE` explains a server's log.",
    )
    for names, options in FLAGS.items():
        made.add_argument(*names, **options)
    return made


def split_flags(tokens: Sequence[str]) -> tuple[Given, ...]:
    """Group the tokens behind each `--flag`; `--flag=value` counts as one value."""
    groups: list[tuple[str, list[str]]] = []
    for token in tokens:
        if token.startswith("--") and len(token) > 2:
            name, equals, value = token[2:].partition("=")
            groups.append((name.replace("_", "-"), [value] if equals else []))
        elif groups:
            groups[-1][1].append(token)
        else:
            raise ConfigError(
                f"{token!r} stands before any flag: give the model with --model {token}."
            )
    return tuple(Given(ALIASES.get(name, name), tuple(values)) for name, values in groups)


def parse(argv: Sequence[str]) -> Request:
    """Command line -> Request. Raises ConfigError for what can be refused without a machine."""
    own, rest = parser().parse_known_args(list(argv))
    if own.machine and not own.plan:
        raise ConfigError(
            f"--machine {own.machine} describes another machine, so nothing can be started for it:"
            " add --plan to see what would be set there."
        )
    return Request(
        model=own.model,
        draft=own.draft,
        given=split_flags(rest),
        speculation=own.fastverify_speculation == "on",
        attention=own.fastverify_attention,
        profile=own.fastverify_profile,
        plan=own.plan,
        machine=own.machine,
        debug=own.debug,
    )
