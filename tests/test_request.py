"""Command lines: our flags, SGLang's flags kept as given, and bad ones refused."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastverify.errors import ConfigError
from fastverify.request import ALIASES, Given, parse, split_flags


def test_sglang_flags_are_kept_in_order_with_their_values() -> None:
    request = parse(
        ["--model", "tiny", "--tp", "2", "--cuda-graph-bs-decode", "1", "2", "--log_level=debug"]
    )
    assert request.given == (
        Given("tp-size", ("2",)),
        Given("cuda-graph-bs-decode", ("1", "2")),
        Given("log-level", ("debug",)),
    )
    assert request.value("tp-size") == "2"
    assert request.value("port") is None


def test_a_switch_has_an_empty_value_and_the_last_flag_counts() -> None:
    request = parse(["--model=x", "--trust-remote-code", "--port", "1", "--port", "2"])
    assert request.value("trust-remote-code") == ""
    assert request.value("port") == "2"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "--model"),
        (["--model", "tiny", "--plan=yaml"], "yaml"),
        (["--model", "tiny", "--fastverify-attention", "fa9"], "fa9"),
        (["--model", "tiny", "--machine", "m.json"], "--machine m.json describes another machine"),
        (["tiny"], "--model"),
    ],
)
def test_bad_command_lines_are_one_sentence(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_value_before_any_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tiny' stands before any flag"):
        split_flags(["tiny", "--tp", "2"])


NAMES = st.from_regex(r"[a-z]{3,9}", fullmatch=True)
VALUES = st.lists(st.text("ab1{}: "), max_size=3)


@given(st.lists(st.tuples(NAMES, VALUES)))
def test_splitting_loses_nothing(flags: list[tuple[str, list[str]]]) -> None:
    tokens = [token for name, values in flags for token in (f"--{name}", *values)]
    found = split_flags(tokens)
    assert [(g.flag, list(g.values)) for g in found] == [
        (ALIASES.get(name, name), values) for name, values in flags
    ]


def test_our_aliases_are_those_of_sglang() -> None:
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    actions = parser._option_string_actions
    for alias, name in ALIASES.items():
        # argparse takes any unambiguous prefix, `--tp` among them.
        found = parser._get_option_tuples(f"--{alias}") if f"--{alias}" not in actions else None
        action = found[0][0] if found else actions[f"--{alias}"]
        assert f"--{name}" in action.option_strings
