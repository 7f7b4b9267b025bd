"""Measurements that the doctor can judge, as one JSON file; every part is optional.

The probe, the benchmarks and the server's run folder hold such numbers; a person can write them
down as well. `{"measurements": 1, "steps": [...]}`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from fastverify.errors import ConfigError

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Cell = Literal["-", "ok", "wrong", "timeout", "unmappable", "unread"]
SCHEMA = 1


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Step(_Part, frozen=True):
    """A plain step against an iteration with drafts, in ms; `ratio` replaces the two times."""

    name: str = ""
    decode_ms: Positive | None = None
    round_ms: Positive | None = None
    ratio: Positive | None = None
    accept_length: Positive | None = None
    context: Count | None = None
    drafts: Count | None = None
    speculating: bool | None = None


class Throughput(_Part, frozen=True):
    """Tokens per second with and without drafts at one context and number of requests."""

    context: Count
    requests: Count
    speculative: Positive
    plain: Positive


class VerifyCost(_Part, frozen=True):
    """Measured verify times. accepted: prompt class -> cumulative acceptance by position."""

    points: tuple[tuple[Count, Positive], ...]
    draft_ms: Amount
    step_ms: Positive
    accepted: dict[str, tuple[Share, ...]] = {}


class Positions(_Part, frozen=True):
    """Cumulative acceptance by position, and the cost of an iteration: base + slope x drafts."""

    accepted: tuple[Share, ...]
    base: Positive
    slope: Amount


class CaptureList(_Part, frozen=True):
    """Captured batch sizes of one phase, and what can be asked for."""

    batches: tuple[Count, ...]
    max_running: Count
    rows: Count = 1
    phase: Literal["decode", "verify", "draft", "draft_extend"] = "verify"
    padding: bool = True


class Schedule(_Part, frozen=True):
    """Draft lengths by batch: (first batch, last batch, drafts), and the batches captured each."""

    lengths: tuple[tuple[Count, Count, Count], ...]
    captured: dict[Count, tuple[Count, ...]] = {}


class Bucket(_Part, frozen=True):
    """One captured batch, timed eagerly and as a graph."""

    batch: Count
    eager_ms: Positive
    graph_ms: Positive


class Curve(_Part, frozen=True):
    """Time of one all-reduce variant by message size; null where it did not come back."""

    variant: str
    points: tuple[tuple[Count, Positive | None], ...]


class Crossover(_Part, frozen=True):
    """Largest message of the custom path, and the rows that will be served."""

    limit_bytes: Count
    hidden: Count
    drafts: Count
    batches: tuple[Count, ...]


class Flows(_Part, frozen=True):
    """GB/s of writes and reads: one flow, two behind one switch to one root, and to two roots."""

    single: Positive
    pair_same_root: Positive | None = None
    pair_two_roots: Positive | None = None
    reads_two_roots: Positive | None = None


class Canary(_Part, frozen=True):
    """Acceptance on the same prompts without and with the fused path."""

    off: tuple[Share, ...]
    on: tuple[Share, ...]


class Tokens(_Part, frozen=True):
    """Ids that were accepted, against the tokenizer's size."""

    vocab_size: Count
    tokenizer_size: Count
    accepted: tuple[Count, ...]


class Bench(_Part, frozen=True):
    """How a benchmark was run."""

    requested: Count
    running_avg: Amount
    warmup_s: Amount
    counter: Literal["tokens", "finished_requests"] = "tokens"


class Result(_Part, frozen=True):
    """One benchmark's speed and the baseline it is compared with, tokens/s."""

    name: str
    speculative: Positive
    baseline: Positive


class Weighted(_Part, frozen=True):
    """One message size: share of all messages, and its time before and after a change."""

    bytes: Count
    share: Share
    before_us: Positive
    after_us: Positive


class Load(_Part, frozen=True):
    """A GPU's load at one moment. last_log: what the server printed last."""

    gpu: Count
    util_percent: Amount
    power_w: Amount
    limit_w: Positive
    last_log: str = ""


class Heartbeat(_Part, frozen=True):
    """What a server did in the last seconds, and what its health page said."""

    seconds: Positive
    tokens: Count
    running: Count
    http: Count


class Trial(_Part, frozen=True):
    """One attempt of the same program with another NCCL."""

    nccl: str
    result: Literal["ok", "hang", "crash", "wrong"]


class Cache(_Part, frozen=True):
    """Something kept on disk, and what it was made with against what is there now."""

    name: str
    made_with: dict[str, str]
    now: dict[str, str]


class Feature(_Part, frozen=True):
    """What was asked for, whether it runs, and why not."""

    name: str
    active: bool
    because: str = ""


class Timing(_Part, frozen=True):
    """A faster path against what it replaces, and whether its workspace is whole."""

    name: str
    time_ms: Positive
    baseline_ms: Positive
    workspace_pointer: Count | None = None


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All measurements of one file. ranks: what each rank decided, step by step."""

    measurements: int = SCHEMA
    steps: tuple[Step, ...] = ()
    throughput: tuple[Throughput, ...] = ()
    verify_cost: VerifyCost | None = None
    positions: Positions | None = None
    free_rows: Count | None = None
    drafts: Count | None = None
    launches: tuple[Count, Positive] | None = None
    capture: CaptureList | None = None
    schedule: Schedule | None = None
    buckets: tuple[Bucket, ...] = ()
    curves: tuple[Curve, ...] = ()
    crossover: Crossover | None = None
    flows: Flows | None = None
    pair_gbs: tuple[tuple[Amount, ...], ...] = ()
    pair_us: tuple[tuple[Amount, ...], ...] = ()
    probe: tuple[tuple[Cell, ...], ...] = ()
    canary: Canary | None = None
    accept_histograms: tuple[tuple[Count, ...], ...] = ()
    ranks: tuple[tuple[str, ...], ...] = ()
    hosts: Count | None = None
    tuned_rows: tuple[Count, ...] = ()
    served_rows: tuple[Count, ...] = ()
    tokens: Tokens | None = None
    bench: Bench | None = None
    results: tuple[Result, ...] = ()
    sizes: tuple[Weighted, ...] = ()
    loads: tuple[Load, ...] = ()
    heartbeat: Heartbeat | None = None
    trials: tuple[Trial, ...] = ()
    caches: tuple[Cache, ...] = ()
    features: tuple[Feature, ...] = ()
    timings: tuple[Timing, ...] = ()
    draft_logits: tuple[Count, Count] | None = None
    arguments: tuple[dict[str, str], ...] = ()
    environment: dict[str, str] = {}
    groups: tuple[Count, ...] = ()
    profile: Literal["latency", "throughput"] | None = None


def parse_measured(text: str, name: str) -> Measured:
    """Read a measurements file. Raises ConfigError naming the field that does not fit."""
    try:
        found = msgspec.json.decode(text, type=Measured)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(
            f"{name} is not a measurements file ({' '.join(str(error).split())}); correct that"
            " field."
        ) from None
    if found.measurements != SCHEMA:
        raise ConfigError(
            f"{name} has measurements {found.measurements}, this version reads {SCHEMA}; write it"
            " again with the installed fastverify."
        )
    for field in ("probe", "pair_gbs", "pair_us"):
        matrix = getattr(found, field)
        if any(len(row) != len(matrix) for row in matrix):
            raise ConfigError(
                f"{name} has a {field} matrix of {len(matrix)} rows that is not square; give one"
                " row and one column for each GPU."
            )
    return found


def merge_measured(parts: list[Measured]) -> Measured:
    """One value from several files; the last file wins where both have a part."""
    empty = merged = Measured()
    for part in parts:
        given = {
            field: getattr(part, field)
            for field in Measured.__struct_fields__
            if getattr(part, field) != getattr(empty, field)
        }
        merged = msgspec.structs.replace(merged, **given)
    return merged
