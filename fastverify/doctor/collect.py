"""Files of any kind -> Evidence; what a file is, is read off its content."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from fastverify.doctor import hosttext, smi
from fastverify.doctor.assemble import Pieces, assemble
from fastverify.doctor.evidence import Evidence
from fastverify.doctor.measured import Measured, merge_measured, parse_measured
from fastverify.errors import ConfigError
from fastverify.logs.metrics import Dump, parse_metrics
from fastverify.logs.nccl import NcclLog, parse_nccl
from fastverify.logs.server import ServerLog, parse_server
from fastverify.logs.text import Text, read_text
from fastverify.machine.facts import Machine, Virtualisation, select
from fastverify.machine.finding import Finding
from fastverify.machine.nvml import visible_indices
from fastverify.machine.store import parse_machine

KINDS = (
    "a server log, NCCL output, a /metrics page, a kernel log, nvidia-smi topo -m / -p2p / -q /"
    " csv, lspci -vv, the driver's params, /proc/cmdline, env output, an NCCL graph file, a machine"
    " file or a measurements file"
)
_GUESTS: dict[str, Virtualisation] = {"none": "none", "wsl": "wsl"}
_GUEST_WORD = re.compile(r"none|wsl|kvm|qemu|vmware|microsoft|xen|amazon|google|oracle|parallels")
_ENVIRONMENT_CHARS = 100_000
_RELEASE = re.compile(r"\d+\.\d+\.\d+[\w.+-]*")
_ASSIGNMENT = re.compile(r"(?:export )?([A-Za-z_]\w{1,80})=(.*)")
_INTERESTING = re.compile(r"(?:NCCL|CUDA|PYTORCH|SGLANG|VLLM|FLASHINFER|FASTVERIFY)_|LD_PRELOAD$")


class _Pile:
    """What the files read so far hold."""

    def __init__(self) -> None:
        self.pieces = Pieces()
        self.machine: Machine | None = None
        self.measured: list[Measured] = []
        self.environ: dict[str, str] | None = None
        self.fields: dict[str, Any] = {}
        self.servers: list[ServerLog] = []
        self.nccl: NcclLog | None = None
        self.dumps: list[Dump] = []
        self.notes: list[Finding] = []


def collect(paths: Sequence[str | Path], base: Machine | None = None) -> Evidence:
    """Read every file into one Evidence; texts about a machine are laid over `base`.

    Raises ConfigError with one sentence for a file that cannot be read, is of no known kind, is
    damaged, or contradicts another.
    """
    pile = _Pile()
    for path in paths:
        text = read_text(path)
        if text.skipped:
            note = f"{text.name} is long: {text.skipped >> 20} MiB in its middle were not read."
            pile.notes.append(Finding("info", "file-cut", note))
        add = next((add for fits, add in READERS if fits(text.body)), _log)
        add(pile, text)
    measured = merge_measured(pile.measured)
    environ = pile.environ
    if measured.environment:
        environ = {**(environ or {}), **measured.environment}
    machine = assemble(pile.pieces, pile.machine or base)
    return Evidence(
        machine=_visible(machine, environ),
        installed=machine,
        environ=environ,
        measured=measured,
        profile=measured.profile or "latency",
        servers=tuple(pile.servers),
        nccl=pile.nccl,
        dumps=tuple(pile.dumps),
        notes=tuple(pile.notes),
        complete=pile.machine is not None,
        **pile.fields,
    )


def _visible(machine: Machine | None, environ: dict[str, str] | None) -> Machine | None:
    """The GPUs that a recorded environment leaves visible, where the facts are of all of them."""
    setting = (environ or {}).get("CUDA_VISIBLE_DEVICES")
    if machine is None or setting is None or machine.visible is not None:
        return machine
    chosen = visible_indices(setting, (None,) * len(machine.gpus))
    return select(machine, chosen) if chosen else machine


def _json(pile: _Pile, text: Text) -> None:
    if '"measurements"' in text.body:
        pile.measured.append(parse_measured(text.body, text.name))
    else:
        pile.machine = parse_machine(text.body.encode(), text.name)


def _graph(pile: _Pile, text: Text) -> None:
    pile.fields["graph_text"] = text.body


def _query(pile: _Pile, text: Text) -> None:
    pile.pieces.smi = smi.parse_smi(text.body)
    pile.fields["samples"] = smi.samples(pile.pieces.smi)
    pile.fields["mig"] = smi.in_mig_mode(pile.pieces.smi)


def _csv(pile: _Pile, text: Text) -> None:
    pile.pieces.rows = smi.parse_csv(text.body)


def _table(pile: _Pile, text: Text) -> None:
    """`topo -m` or `topo -p2p`: the latter has no affinity columns and no link codes."""
    head = text.body.split("Legend")[0]
    if re.search(r"Affinity|\b(?:PIX|PXB|PHB|NODE|SYS|NV\d+)\b", head):
        pile.pieces.links, pile.pieces.numa = smi.parse_topo(text.body)
        return
    matrix = smi.parse_p2p(text.body)
    if re.search(r"write|[-_.]w\b", Path(text.name).name) or pile.pieces.p2p_read:
        pile.pieces.p2p_write = matrix
    else:
        pile.pieces.p2p_read = matrix


def _lspci(pile: _Pile, text: Text) -> None:
    pile.fields["bridges"] = hosttext.parse_lspci(text.body)


def _params(pile: _Pile, text: Text) -> None:
    pile.pieces.keys, pile.pieces.resizable_bar = hosttext.parse_params(text.body)


def _cmdline(pile: _Pile, text: Text) -> None:
    words = (word for word in text.body.split() if re.match(r"\w*iommu|pcie?|vfio", word))
    pile.pieces.cmdline = tuple(words)


def _word(pile: _Pile, text: Text) -> None:
    word = text.body.strip().lower()
    if _GUEST_WORD.fullmatch(word):
        pile.pieces.virtualisation = _GUESTS.get(word, "vm")
    elif "microsoft" in word:
        pile.pieces.virtualisation = "wsl"


def _environment(pile: _Pile, text: Text) -> None:
    found = (_ASSIGNMENT.fullmatch(line.strip()) for line in text.body.split("\n"))
    values = {m.group(1): m.group(2).strip("'\"") for m in found if m}
    # Everything else in `env` is nobody's business.
    kept = {name: value for name, value in values.items() if _INTERESTING.match(name)}
    pile.environ = {**(pile.environ or {}), **kept}


def _metrics(pile: _Pile, text: Text) -> None:
    pile.dumps.append(parse_metrics(text.body, text.name))


def _log(pile: _Pile, text: Text) -> None:
    server, nccl = parse_server(text.body), parse_nccl(text.body)
    kernel = hosttext.parse_kernel_log(text.body)
    if server is None and nccl is None and kernel is None:
        raise ConfigError(f"{text.name} is of no known kind; give {KINDS}.")
    if server is not None:
        pile.servers.append(server)
    pile.nccl = nccl or pile.nccl
    if kernel is not None:
        pile.fields["kernel"] = kernel


def _is_environment(text: str) -> bool:
    lines = [line.strip() for line in text[:_ENVIRONMENT_CHARS].split("\n") if line.strip()]
    fitting = [m for line in lines if (m := _ASSIGNMENT.fullmatch(line))]
    return len(fitting) == len(lines) and any(_INTERESTING.match(m.group(1)) for m in fitting)


def _matches(pattern: str) -> Callable[[str], bool]:
    compiled = re.compile(pattern, re.MULTILINE)
    return lambda text: compiled.search(text[:200_000]) is not None


def _is_word(text: str) -> bool:
    word = text.strip().lower()
    return bool(_GUEST_WORD.fullmatch(word) or _RELEASE.fullmatch(word))


READERS: tuple[tuple[Callable[[str], bool], Callable[[_Pile, Text], None]], ...] = (
    (lambda text: text.lstrip().startswith("{"), _json),
    (_matches(r"\A\s*(?:<\?xml[^>]*>\s*)?(?:<!--[^>]*-->\s*)?<graphs?\b"), _graph),
    (_matches(r"^(?:# (?:HELP|TYPE) )?(?:sglang|vllm):\w+"), _metrics),
    (_matches(r"=NVSMI LOG=|^GPU [0-9A-F]{8}:[0-9A-F]{2}:"), _query),
    (_matches(r"\A\s*(?:index|name|pci\.bus_id|pcie\.link\.[\w.]+|compute_cap)\b[^\n]*,"), _csv),
    (_matches(r"^\s*GPU0[ \t]+X\b"), _table),
    (_matches(r"^RegistryDwords:|^EnableResizableBar:"), _params),
    (_matches(r"^(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] \w"), _lspci),
    (
        _matches(r"\A\s*(?:BOOT_IMAGE=\S+|(?:\w*iommu|root|ro|quiet)(?:=\S*)?)(?: [^\n]*)?\s*\Z"),
        _cmdline,
    ),
    (_is_word, _word),
    (_is_environment, _environment),
)


def merge(base: Evidence, files: Evidence) -> Evidence:
    """Evidence of a machine with what files add; the files win."""
    empty = Evidence()
    given = {
        field: getattr(files, field)
        for field in Evidence.__struct_fields__
        if field not in ("installed", "notes", "complete")
        and getattr(files, field) != getattr(empty, field)
    }
    if base.environ and files.environ:
        given["environ"] = {**base.environ, **files.environ}
    notes = (*base.notes, *files.notes)
    return msgspec.structs.replace(base, **given, notes=notes)
