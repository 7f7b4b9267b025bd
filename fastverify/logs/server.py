"""Parser for the logs of SGLang and vLLM servers."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime

import msgspec

from fastverify.logs.troubles import Phase, Trouble, trouble_in


class Decode(msgspec.Struct, frozen=True):
    """One decode line of SGLang. None: the line does not say."""

    running: int
    graph: bool | None = None
    accept_length: float | None = None
    accept_rate: float | None = None
    tokens_per_s: float | None = None


class Capture(msgspec.Struct, frozen=True):
    """One announced capture: `target verify`, `draft decode`, .. and rows a request."""

    role: str
    rows: int | None
    finished: bool = False
    batches: tuple[int, ...] = ()


class Load(msgspec.Struct, frozen=True):
    """One loaded model: its class and quantisation as the server prints them."""

    architecture: str
    quantization: str | None


class Window(msgspec.Struct, frozen=True):
    """One acceptance report of vLLM. positions: cumulative rate of draft 1, 2, .."""

    length: float
    accepted: int | None
    drafted: int | None
    positions: tuple[float, ...] = ()


class Gate(msgspec.Struct, frozen=True):
    """A fast path that switched itself off: class, reason, and how often it said so."""

    name: str
    reason: str
    count: int


class ServerLog(msgspec.Struct, frozen=True):
    """What a server's log says. speculative: it drafts; None when the log does not tell.

    eager_backend: the attention backend for which full graphs were given up. updated_at: how many
    decode lines preceded the last weight update, None without one.
    """

    engine: str
    arguments: dict[str, str] = {}
    speculative: bool | None = None
    decodes: tuple[Decode, ...] = ()
    captures: tuple[Capture, ...] = ()
    loads: tuple[Load, ...] = ()
    windows: tuple[Window, ...] = ()
    gates: tuple[Gate, ...] = ()
    troubles: tuple[Trouble, ...] = ()
    piecewise: bool = False
    eager_backend: str | None = None
    updated_at: int | None = None
    cached_prefill: bool = False


_STAMP = re.compile(r"(\d{4}-\d\d-\d\d|\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?")
_RANK = re.compile(r"(?:\bTP(\d{1,3})\b|\[[Rr]ank ?(\d{1,3})\]|Worker_TP(\d{1,3}))")
_DECODE = re.compile(r"Decode batch\b.*?#running-req: (\d{1,9})")
_FIELD = {
    "accept_length": re.compile(r"(?<!block )accept len: (\d+(?:\.\d+)?)"),
    "accept_rate": re.compile(r"accept rate: (\d+(?:\.\d+)?)"),
    "tokens_per_s": re.compile(r"gen throughput \(token/s\): (\d+(?:\.\d+)?)"),
}
# A CPU has no graphs, so that `cpu graph: False` says nothing.
_GRAPH = re.compile(r"(?<!cpu) graph: (True|False)")
_CAPTURE = re.compile(
    r"Capture (target|draft)? ?([a-z ]*?) ?CUDA graph (begin|end)\.(?:.*?num_tokens_per_req=(\d+))?"
)
_BATCHES = re.compile(r"\bbs=\[([\d, ]{1,4000})\]")
_LOAD = re.compile(r"Load weight end\..*?\btype=(\w+)(?:.*?\bquant=([\w.-]+))?")
_WINDOW = re.compile(r"SpecDecoding metrics: .*?Mean acceptance length: (\d+(?:\.\d+)?)")
_ACCEPTED = re.compile(r"\bAccepted: (\d+) tokens, Drafted: (\d+) tokens")
_POSITIONS = re.compile(r"Per-position acceptance rate: \[?([\d., ]+)")
_GATE = re.compile(r"(\w[\w ]{0,40}?) is disabled because (.{0,160})")
_WORLD = re.compile(r"(\w[\w ]{0,40}?) is disabled due to an? (unsupported world size: \d+)")
_DOWNGRADE = re.compile(r"FULL\w* is not supported with (\S+)")
_MODE = re.compile(r"cudagraph_mode\W{1,12}(?:\w+\.)?PIECEWISE")
_ARGUMENT = re.compile(r"'?(\w{2,60})'?(?:=|: )('[^']{0,300}'|\"[^\"]{0,300}\"|[\w.+-]{1,80})")
_SPECULATION = re.compile(
    r"speculative_algorithm'?[=:] ?'\w+|num_spec(?:ulative)?_tokens\W{1,3}[1-9]|"
    r"speculative_config'?[=:] ?(?!None)\S"
)
_UPDATE = re.compile(r"Start update_weights|Update weights end|update_weights_from_\w+")
_SGLANG = ("server_args=", "Decode batch", "Prefill batch", "Load weight", "CUDA graph begin")
_VLLM = ("vLLM", "SpecDecoding metrics", "EngineCore", "cudagraph_mode")


# One of these is in every line that `_facts` reads; most lines of a long log have none.
_TELLING = (
    "server_args=",
    "non-default args",
    "speculative_config",
    "CUDA graph",
    "Load weight",
    "SpecDecoding",
    "is disabled",
    "cudagraph_mode",
    "FULL",
    "pdate weights",
    "update_weights",
    "Prefill batch",
)


class _Builder:
    """Collects one log; the order of lines matters for captures and weight updates."""

    def __init__(self) -> None:
        self.engine = ""
        self.arguments: dict[str, str] = {}
        self.speculative: bool | None = None
        self.decodes: list[Decode] = []
        self.captures: list[Capture] = []
        self.loads: list[Load] = []
        self.windows: list[Window] = []
        self.gates: Counter[tuple[str, str]] = Counter()
        self.troubles: list[Trouble] = []
        self.piecewise = False
        self.eager_backend: str | None = None
        self.updated_at: int | None = None
        self.cached_prefill = False

    def feed(self, line: str) -> None:
        if not self.engine:
            self.engine = _engine(line)
        if "Decode batch" in line and (decode := _DECODE.search(line)) is not None:
            self.decodes.append(_decode(line, int(decode.group(1))))
            return
        self._facts(line)
        kind = trouble_in(line)
        if kind is not None:
            rank = _rank(line)
            seen = any(t.kind == kind and t.rank == rank for t in self.troubles)
            if not seen:
                self.troubles.append(Trouble(kind, rank, _time(line), self._phase(), line[:200]))

    def _phase(self) -> Phase:
        if self.captures and not self.captures[-1].finished:
            return "capture"
        if self.decodes or self.windows:
            return "serving"
        return "replay" if self.captures else "start"

    def _facts(self, line: str) -> None:
        if not any(word in line for word in _TELLING):
            return
        if "server_args=" in line or "non-default args" in line or "speculative_config" in line:
            self.arguments |= {k: v.strip("'\"") for k, v in _ARGUMENT.findall(line)}
            self.speculative = bool(_SPECULATION.search(line)) or bool(self.speculative)
        if (found := _CAPTURE.search(line)) is not None:
            self._capture(line, found)
        elif (found := _LOAD.search(line)) is not None:
            self.loads.append(Load(found.group(1), found.group(2)))
        elif (found := _WINDOW.search(line)) is not None:
            self.windows.append(_window(line, float(found.group(1))))
        elif (found := _GATE.search(line) or _WORLD.search(line)) is not None:
            self.gates[found.group(1).split()[-1], _reason(found.group(2))] += 1
        if (found := _DOWNGRADE.search(line)) is not None:
            self.eager_backend = found.group(1)
        if _MODE.search(line) is not None:
            self.piecewise = True
        if _UPDATE.search(line) is not None and (self.captures or self.decodes):
            self.updated_at = len(self.decodes)
        if "Prefill batch" in line and re.search(r"#cached-token: [1-9]", line):
            self.cached_prefill = True

    def _capture(self, line: str, found: re.Match[str]) -> None:
        role = f"{found.group(1) or 'target'} {found.group(2) or 'decode'}".strip()
        listed = _BATCHES.search(line)
        batches = (
            tuple(int(n) for n in listed.group(1).split(",") if n.strip().isdecimal())
            if listed
            else ()
        )
        if found.group(3) == "begin":
            rows = int(found.group(4)) if found.group(4) else None
            self.captures.append(Capture(role, rows, batches=batches))
            return
        for position in range(len(self.captures) - 1, -1, -1):
            begun = self.captures[position]
            if begun.role == role and not begun.finished:
                done = Capture(role, begun.rows, True, batches or begun.batches)
                self.captures[position] = done
                return

    def build(self) -> ServerLog:
        return ServerLog(
            engine=self.engine,
            arguments=self.arguments,
            speculative=self._drafts(),
            decodes=tuple(self.decodes),
            captures=tuple(self.captures),
            loads=tuple(self.loads),
            windows=tuple(self.windows),
            gates=tuple(Gate(name, why, count) for (name, why), count in self.gates.items()),
            troubles=tuple(self.troubles),
            piecewise=self.piecewise,
            eager_backend=self.eager_backend,
            updated_at=self.updated_at,
            cached_prefill=self.cached_prefill,
        )

    def _drafts(self) -> bool | None:
        signs = bool(self.windows) or any(d.accept_length is not None for d in self.decodes)
        signs = signs or any("verify" in capture.role for capture in self.captures)
        return True if signs else self.speculative


def parse_server(text: str) -> ServerLog | None:
    """Read a server log; None when no line of it belongs to SGLang or vLLM."""
    builder = _Builder()
    for line in text.split("\n"):
        if line:
            builder.feed(line[:20000])
    known = builder.engine or builder.gates or builder.piecewise or builder.troubles
    return builder.build() if known else None


def _engine(line: str) -> str:
    if any(mark in line for mark in _SGLANG):
        return "sglang"
    return "vllm" if any(mark in line for mark in _VLLM) else ""


def _decode(line: str, running: int) -> Decode:
    found = {name: pattern.search(line) for name, pattern in _FIELD.items()}
    graph = _GRAPH.search(line)
    return Decode(
        running,
        graph.group(1) == "True" if graph else None,
        **{name: float(match.group(1)) if match else None for name, match in found.items()},
    )


def _window(line: str, length: float) -> Window:
    counts, rates = _ACCEPTED.search(line), _POSITIONS.search(line)
    cells = [cell.strip() for cell in rates.group(1).split(",")] if rates else []
    numbers = [float(cell) for cell in cells if re.fullmatch(r"\d+(\.\d+)?", cell)]
    accepted, drafted = (int(n) for n in counts.groups()) if counts else (None, None)
    return Window(length, accepted, drafted, tuple(numbers))


def _reason(text: str) -> str:
    for word in ("two PCIe-only GPUs", "spans across nodes", "P2P test failed", "world size"):
        if word in text:
            return word if word != "world size" else text[:40]
    return text.split(".")[0][:80]


def _rank(line: str) -> int | None:
    found = _RANK.search(line[:200])
    return int(next(group for group in found.groups() if group)) if found else None


def _time(line: str) -> float | None:
    """Seconds on a clock that is common to the lines of one log; vLLM prints no year."""
    found = _STAMP.search(line[:120])
    if found is None:
        return None
    day, clock, fraction = found.groups()
    day = day if len(day) == 10 else f"2000-{day}"
    try:
        moment = datetime.fromisoformat(f"{day} {clock}")
    except ValueError:
        return None
    base = (moment - datetime(2000, 1, 1)).total_seconds()
    return base + (float(f"0.{fraction}") if fraction else 0.0)
