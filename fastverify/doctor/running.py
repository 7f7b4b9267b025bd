"""Checks of a server while it runs, of benchmark runs, and of trials that somebody made."""

from __future__ import annotations

from collections.abc import Iterator

from fastverify.doctor.evidence import Evidence
from fastverify.doctor.measured import Load
from fastverify.machine.finding import Finding

_SPIN_UTIL = 95.0
_SPIN_POWER = 0.3
_FULL_POWER = 0.9
_WAITING_POWER = 0.3
_RAN = 0.95


def spinning(evidence: Evidence) -> Iterator[Finding]:
    """GPUs fully busy at about idle power: a kernel that polls for a peer."""
    loads = _loads(evidence)
    spin = [
        s for s in loads if s.util_percent >= _SPIN_UTIL and s.power_w < _SPIN_POWER * s.limit_w
    ]
    if spin and len(spin) == len(loads):
        worst = spin[0]
        text = (
            f"GPU {', '.join(str(s.gpu) for s in spin[:8])}: {worst.util_percent:.0f}% busy at"
            f" {worst.power_w:g} of {worst.limit_w:g} W: a collective polls for a peer's flag,"
            " whatever the top of the stack says; set NCCL_P2P_DISABLE=1 and"
            " --disable-custom-all-reduce."
        )
        yield Finding("fail", "spin-wait", text, "R27, R40, R41")
    elif len(loads) > 1:
        yield from _waiting(loads)


def _waiting(loads: tuple[Load, ...]) -> Iterator[Finding]:
    shares = sorted((s.power_w / s.limit_w, s) for s in loads if s.util_percent >= 50)
    if len(shares) < 2:
        return
    (low, idle), (high, working) = shares[0], shares[-1]
    if high - low > 0.2 and low < _WAITING_POWER:
        text = (
            f"GPU {idle.gpu} draws {idle.power_w:g} of {idle.limit_w:g} W while GPU {working.gpu}"
            f" draws {working.power_w:g} of {working.limit_w:g}: GPU {idle.gpu} waits for GPU"
            f" {working.gpu} at every barrier; use equal cards and slots in one group."
        )
        yield Finding("warn", "gpu-waits", text, "R52")


def _loads(evidence: Evidence) -> tuple[Load, ...]:
    taken = tuple(
        Load(s.gpu, s.util_percent, s.power_w, s.limit_w)
        for s in evidence.samples
        if s.util_percent is not None and s.power_w is not None and s.limit_w
    )
    return evidence.measured.loads or taken


def heartbeat(evidence: Evidence) -> Iterator[Finding]:
    """Requests that run and give no token, whatever the health page says."""
    beat = evidence.measured.heartbeat
    if beat is not None and beat.running and not beat.tokens:
        text = (
            f"{beat.running} requests run and no token came in {beat.seconds:g} s, while the health"
            f" page answers {beat.http}: the server hangs; see the last collective of each rank"
            " with NCCL_DEBUG_SUBSYS=COLL."
        )
        yield Finding("fail", "stalled", text, "R40")


def bench(evidence: Evidence) -> Iterator[Finding]:
    """Benchmark runs that do not measure what they say."""
    run = evidence.measured.bench
    if run is None:
        return
    if run.requested and run.running_avg < _RAN * run.requested:
        text = (
            f"{run.running_avg:g} of {run.requested} requests ran on average; report the average,"
            " or raise --max-running-requests."
        )
        yield Finding("warn", "bench-concurrency", text, "R106")
    if run.warmup_s <= 0:
        text = "the run had no warm-up, so its first cell is too slow; warm up for 20 s."
        yield Finding("warn", "bench-warmup", text, "R106")
    if run.counter == "finished_requests":
        text = (
            "the counter moves only when requests finish; take whole requests, not a time window."
        )
        yield Finding("warn", "bench-counter", text, "R106")


def trials(evidence: Evidence) -> Iterator[Finding]:
    """The same failure under several NCCL versions."""
    made = evidence.measured.trials
    versions = {trial.nccl for trial in made}
    results = {trial.result for trial in made}
    if len(versions) > 1 and len(results) == 1 and "ok" not in results:
        text = (
            f"NCCL {', '.join(sorted(versions))} all end in {results.pop()!r}, so another NCCL will"
            " not help; look at IOMMU, ACS and the peer probe."
        )
        yield Finding("warn", "not-nccl", text, "R28")


def features(evidence: Evidence) -> Iterator[Finding]:
    """What was asked for and does not run."""
    for feature in evidence.measured.features:
        if not feature.active:
            why = feature.because or "no reason was given"
            text = f"{feature.name} was requested and is not active, because {why}."
            yield Finding("warn", "requested-inactive", text, "R58")


def caches(evidence: Evidence) -> Iterator[Finding]:
    """Things kept on disk that were made with something else than is there now."""
    for cache in evidence.measured.caches:
        changed = [key for key, value in cache.now.items() if cache.made_with.get(key) != value]
        if changed:
            key = changed[0]
            was = cache.made_with.get(key, "nothing recorded")
            text = (
                f"{cache.name} was made with {key} {was} and this machine has {cache.now[key]};"
                " delete it, so that it is made again."
            )
            yield Finding("warn", "cache-stale", text, "R51, R115")


CHECKS = (spinning, heartbeat, bench, trials, features, caches)
