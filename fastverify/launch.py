"""`python -m fastverify.launch`: machine and model -> plan -> SGLang, in this process."""

from __future__ import annotations

import os
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Sequence

import msgspec

from fastverify import env, reports, show, status
from fastverify.checks import check_port, check_versions, installed_versions
from fastverify.comm.nccl_values import user_environment
from fastverify.doctor.diagnose import cheap_findings
from fastverify.errors import ConfigError, FastverifyError
from fastverify.inputs import Inputs, gather
from fastverify.plan import LaunchPlan
from fastverify.planner import plan as make_plan
from fastverify.request import Request, parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run the launcher; returns the exit code: 0 done, 2 refused with one sentence."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(arguments)
    except FastverifyError as error:
        if "--debug" in arguments:
            raise
        print(f"fastverify: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def run(arguments: Sequence[str]) -> int:
    """Parse, plan, print; then serve unless only the plan was asked for."""
    request = parse(arguments)
    env.disabled()  # refuses a value it would not understand later, in another process
    if not request.plan:
        check_versions(installed_versions(), sys.version_info[:2])
    inputs = gather(request)
    plan = make_plan(inputs, user_environment(os.environ))
    if not request.machine:
        seen = cheap_findings(inputs.machine, os.environ, known=plan.findings)
        plan = msgspec.structs.replace(plan, findings=(*plan.findings, *seen))
    show.print_plan(plan, as_json=request.plan == "json")
    if request.plan:
        return 0
    fatal = [finding.text for finding in plan.findings if finding.severity == "fail"]
    if fatal:
        raise ConfigError(fatal[0])
    return serve(inputs, plan)


def serve(inputs: Inputs, plan: LaunchPlan) -> int:
    """Set the environment, start SGLang, print the status table once it serves."""
    host, port = address(inputs.request)
    check_port(host, port)
    os.environ.update(plan.variables())
    with RunFolder() as folder:
        os.environ["FASTVERIFY_RUN_DIR"] = str(folder)
        # Late on purpose: SGLang reads its environment while it is imported.
        from fastverify.hooks import server

        print(
            "fastverify: loading SGLang and the model; the status table follows when it serves",
            file=sys.stderr,
            flush=True,
        )
        server.check_arguments(plan.argv())
        try:
            server.serve(plan.argv(), lambda: report(plan, folder, host, port))
        except Exception as error:
            refused = reports.failures(folder)
            if refused:
                raise ConfigError(" ".join(refused)) from error
            raise
    return 0


def report(plan: LaunchPlan, folder: pathlib.Path, host: str, port: int) -> None:
    """Print the status table and where to send requests."""
    active = reports.read(folder, "active.json", reports.Active)
    if active is not None:
        show.print_status(status.rows(plan, active))
    else:
        print("fastverify: not active (FASTVERIFY_DISABLE=1): plain SGLang", file=sys.stderr)
    print(f"fastverify: ready on http://{host}:{port}/v1", file=sys.stderr, flush=True)


def address(request: Request) -> tuple[str, int]:
    """Host and port SGLang will listen on (its defaults: 127.0.0.1, 30000)."""
    port = request.value("port") or "30000"
    if not port.isdecimal():
        raise ConfigError(f"--port is {port!r}, but it takes a number from 1 to 65535.")
    return request.value("host") or "127.0.0.1", int(port)


class RunFolder:
    """The folder the server's processes share; made here unless FASTVERIFY_RUN_DIR names one."""

    def __init__(self) -> None:
        given = os.environ.get("FASTVERIFY_RUN_DIR", "")
        self._made = not given
        self.path = pathlib.Path(given or tempfile.mkdtemp(prefix="fastverify-"))

    def __enter__(self) -> pathlib.Path:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            for stale in self.path.glob("*.json"):
                stale.unlink()
        except OSError as error:
            raise ConfigError(
                f"FASTVERIFY_RUN_DIR is {self.path}, which cannot be written ({error.strerror}):"
                " name another folder or unset it."
            ) from error
        return self.path

    def __exit__(self, *exception: object) -> None:
        if self._made:
            shutil.rmtree(self.path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
