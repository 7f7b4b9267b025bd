"""Checks of measured all-reduces, flows, acceptance series, ranks and benchmark runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator

from fastverify.breakeven import fit_verify
from fastverify.doctor.evidence import Evidence
from fastverify.doctor.measured import Curve
from fastverify.machine.facts import forced_p2p
from fastverify.machine.finding import Finding

_COLLAPSE = 0.25
_NCCL = "nccl"
# Critical values of the chi-square distribution at 0.1 %, for 1 to 10 degrees of freedom.
_CHI = (10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.32, 26.12, 27.88, 29.59)


def curves(evidence: Evidence) -> Iterator[Finding]:
    """Variants that hang, and the message size up to which each beats NCCL."""
    given = evidence.measured.curves
    nccl = next((c for c in given if c.variant.lower().startswith(_NCCL)), None)
    usable: list[Curve] = []
    for curve in given:
        if curve is nccl:
            continue
        stuck = [size for size, time in curve.points if time is None]
        if stuck:
            text = (
                f"variant {curve.variant} did not come back at {min(stuck)} bytes and is excluded;"
                " the other variants stay in use."
            )
            yield Finding("warn", "variant-timeout", text, "R36, R62")
        else:
            usable.append(curve)
    for curve in usable:
        yield from _against(curve, nccl)
        yield from _staged(evidence, curve)
    if given and not usable and nccl is not None:
        text = "no custom variant is usable, so all-reduces stay on NCCL."
        yield Finding("info", "crossover", text, "R36")


def _against(curve: Curve, nccl: Curve | None) -> Iterator[Finding]:
    theirs = {size: time for size, time in nccl.points if time is not None} if nccl else {}
    rows = sorted(
        (size, time, theirs[size]) for size, time in curve.points if time and size in theirs
    )
    if not rows:
        return
    better = [size for size, ours, other in rows if ours < other]
    worse = [size for size, ours, other in rows if ours >= other]
    if not better:
        text = f"{curve.variant} is slower than NCCL at every measured size; keep NCCL."
    elif not worse:
        text = f"{curve.variant} beats NCCL at every measured size, up to {max(better)} bytes."
    elif max(better) < min(worse):
        text = (
            f"{curve.variant} beats NCCL up to {max(better)} bytes and loses from {min(worse)} on."
        )
    else:
        text = (
            f"{curve.variant} and NCCL cross more than once between {rows[0][0]} and {rows[-1][0]}"
            " bytes; choose by the sizes that verify sends and interpolate nothing."
        )
        yield Finding("info", "curves-cross", text, "R89")
        return
    yield Finding("info", "crossover", text, "R62")


def _staged(evidence: Evidence, curve: Curve) -> Iterator[Finding]:
    """Time in proportion to size from the first KiB: every load goes through host memory."""
    points = [(size >> 10, time) for size, time in curve.points if time and size >= 1024]
    line = fit_verify(points)
    if line is None or points[-1][0] < 64:
        return
    one, per_kib = line
    last = max(points)
    if per_kib > 1.0 and per_kib * last[0] > 0.8 * last[1]:
        keys = forced_p2p(evidence.machine) if evidence.machine else None
        cause = "so check `grep RegistryDwords /proc/driver/nvidia/params`"
        if keys is not None:
            cause = (
                "although ForceP2P is set, so check IOMMU and ACS"
                if keys
                else "and ForceP2P is unset, so see the driver keys in the documentation"
            )
        text = (
            f"{curve.variant} takes {last[1]:g} us at {last[0]} KiB, {per_kib:.2f} us a KiB from"
            f" the first on: peer loads are staged through host memory, {cause}."
        )
        yield Finding("warn", "staged-peer-loads", text, "R83")


def crossover(evidence: Evidence) -> Iterator[Finding]:
    """Which served batches stay below the custom path's limit, counted in verify rows."""
    given = evidence.measured.crossover
    if given is None:
        return
    sizes = {b: b * (given.drafts + 1) * given.hidden * 2 for b in given.batches}
    custom = [b for b, size in sizes.items() if size <= given.limit_bytes]
    nccl = [b for b in given.batches if b not in custom]
    edge = [b for b, size in sizes.items() if size == given.limit_bytes]
    parts = [f"batch {', '.join(map(str, custom))} stays on the custom path"] if custom else []
    parts += [f"batch {', '.join(map(str, nccl))} goes to NCCL"] if nccl else []
    text = (
        f"verify sends {given.drafts + 1} rows a request of {given.hidden * 2} bytes against a"
        f" limit of {given.limit_bytes}: {' and '.join(parts)}"
        + (f", batch {edge[0]} exactly at the limit" if edge else "")
        + "."
    )
    yield Finding("info", "crossover-verify", text, "R85")


def flows(evidence: Evidence) -> Iterator[Finding]:
    """Two GPUs behind one uplink that write to two roots and collapse."""
    given = evidence.measured.flows
    if given is None or given.pair_two_roots is None:
        return
    if given.pair_two_roots < _COLLAPSE * given.single:
        reads = f", while reads keep {given.reads_two_roots:g}" if given.reads_two_roots else ""
        text = (
            f"two GPUs behind one switch writing to two roots fall from {given.single:g} to"
            f" {given.pair_two_roots:g} GB/s{reads}: use a ring (NCCL_ALGO=Ring), staged pushes or"
            " other cabling."
        )
        yield Finding("fail", "write-collapse", text, "R86")


def canary(evidence: Evidence) -> Iterator[Finding]:
    """Acceptance that drops when the fused path is switched on."""
    given = evidence.measured.canary
    if given is None or not given.on or not given.off:
        return
    off, on = statistics.mean(given.off), statistics.mean(given.on)
    noise = max(0.05, 2 * statistics.pstdev(given.off))
    if on < off - noise:
        text = (
            f"acceptance falls from {off:.2f} to {on:.2f} with the fused path on the same prompts:"
            " it returns wrong data; switch it off."
        )
        yield Finding("fail", "accept-canary", text, "R48")
    else:
        text = (
            f"acceptance is {on:.2f} with the fused path and {off:.2f} without, equal within noise."
        )
        yield Finding("info", "accept-canary-passed", text, "R48")


def histograms(evidence: Evidence) -> Iterator[Finding]:
    """Accept histograms of the same prompts before and after an upgrade."""
    given = evidence.measured.accept_histograms
    if len(given) != 2 or not all(sum(counts) for counts in given):
        return
    width = min(max(map(len, given)), len(_CHI) + 1)
    before, after = ([*counts, *([0] * width)][:width] for counts in given)
    total = (sum(before), sum(after))
    statistic, used = 0.0, 0
    for a, b in zip(before, after, strict=True):
        share = (a + b) / sum(total)
        if share == 0:
            continue
        used += 1
        statistic += (a - total[0] * share) ** 2 / (total[0] * share)
        statistic += (b - total[1] * share) ** 2 / (total[1] * share)
    if used > 1 and statistic > _CHI[used - 2]:
        text = (
            f"the accept histogram changed (chi-square {statistic:.0f} over {used} bins): compare"
            " drafter, versions and settings with those of the first."
        )
        yield Finding("warn", "acceptance-changed", text, "R109")
    else:
        yield Finding("info", "acceptance-same", "both accept histograms agree.", "R109")


def ranks(evidence: Evidence) -> Iterator[Finding]:
    """Ranks that decided differently, and at which step first."""
    given = evidence.measured.ranks
    for step in range(max(map(len, given), default=0)):
        chosen = [rank[step] if step < len(rank) else "nothing" for rank in given]
        usual, _ = Counter(chosen).most_common(1)[0]
        other = [rank for rank, choice in enumerate(chosen) if choice != usual]
        if other:
            text = (
                f"at step {step} rank {', '.join(map(str, other))} says {chosen[other[0]]!r} where"
                f" most say {usual!r}; all ranks must take one joint decision, or the next"
                " collective hangs."
            )
            yield Finding("fail", "ranks-disagree", text, "R68, R69, R72")
            return


def tokens(evidence: Evidence) -> Iterator[Finding]:
    """Accepted ids for which the tokenizer has no text."""
    given = evidence.measured.tokens
    outside = [t for t in given.accepted if t >= given.tokenizer_size] if given else []
    if given is not None and outside:
        text = (
            f"id {outside[0]} was accepted and the tokenizer has {given.tokenizer_size} (vocabulary"
            f" padded to {given.vocab_size}): decode may never end; mask the padded ids."
        )
        yield Finding("fail", "padded-token", text, "R53")


def weighted(evidence: Evidence) -> Iterator[Finding]:
    """A speed-up of some sizes, weighted by how often they are sent."""
    sizes = evidence.measured.sizes
    before = sum(s.share * s.before_us for s in sizes)
    if not sizes or before <= 0:
        return
    gain = 1 - sum(s.share * s.after_us for s in sizes) / before
    best = max(1 - s.after_us / s.before_us for s in sizes)
    text = (
        f"weighted by the sizes that decode and verify send, the change gains {gain:.1%}, where its"
        f" best size gains {best:.0%}."
    )
    yield Finding("info", "weighted-gain", text, "R82")


def timings(evidence: Evidence) -> Iterator[Finding]:
    """Paths that are slower than what they replace, or whose workspace is not whole."""
    for timing in evidence.measured.timings:
        if timing.workspace_pointer == 0:
            text = f"the workspace of {timing.name} has a null pointer; do not capture it."
            yield Finding("fail", "workspace-null", text, "R59")
        if timing.time_ms > timing.baseline_ms:
            text = (
                f"{timing.name} takes {timing.time_ms:g} ms where the plain path takes"
                f" {timing.baseline_ms:g}; switch it off."
            )
            yield Finding("warn", "path-slower", text, "R59")


CHECKS = (
    curves,
    crossover,
    flows,
    canary,
    histograms,
    ranks,
    tokens,
    weighted,
    timings,
)
