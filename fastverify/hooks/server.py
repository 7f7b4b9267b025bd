"""Starts SGLang's own HTTP server in this process, with the arguments of the plan."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from fastverify.checks import closest
from fastverify.errors import ConfigError


def check_arguments(argv: Sequence[str]) -> None:
    """Refuse flags and values that SGLang's parser does not take, in one sentence."""
    from sglang.srt.server_args import ServerArgs

    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ConfigError(f"SGLang does not take these arguments: {message}.")

    parser = Parser(prog="sglang", add_help=False)
    ServerArgs.add_cli_args(parser)
    _, unknown = parser.parse_known_args([token for token in argv if token != "--config"])
    flags = [token for token in unknown if token.startswith("--")]
    if flags:
        name = flags[0].partition("=")[0]
        near = closest(name, parser._option_string_actions)
        hint = f"did you mean {near}?" if near else "`sglang serve --help` lists them."
        raise ConfigError(f"{name} is no flag of fastverify or SGLang 0.5.23: {hint}")


def serve(argv: Sequence[str], on_ready: Callable[[], None]) -> None:
    """Serve until interrupted. on_ready runs in a thread once requests are accepted.

    Every process SGLang started is gone when this returns or raises.
    """
    from sglang.launch_server import run_server
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    server_args = prepare_server_args(list(argv))
    try:
        server_args.resolve_once()
        view = resolving_view(server_args)
        if view.encoder_only or view.smg_grpc_mode or view.use_ray:
            # Servers without the ready callback; they run, without our status table.
            run_server(server_args)
        else:
            http_server.launch_server(server_args, launch_callback=on_ready)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)
