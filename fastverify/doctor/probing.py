"""`--probe`: proves the peers and measures every pair, in child processes with a time limit."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from fastverify.comm.probe import Proof
from fastverify.doctor.measured import Cell, Measured
from fastverify.machine.facts import Machine
from fastverify.machine.finding import Finding

MEASURE_SECONDS = 120.0
LARGE_BYTES, LARGE_COPIES = 64 << 20, 10
SMALL_BYTES, SMALL_COPIES = 4 << 10, 200
_PAIR = re.compile(r"GPU (\d+) (?:could not write|wrote \d+ bytes|wrote) to GPU (\d+)")

Table = tuple[tuple[float, ...], ...]


class Probed(msgspec.Struct, frozen=True):
    """What the probe adds to the measurements, and what to say when it could not run."""

    measured: Measured = Measured()
    notes: tuple[Finding, ...] = ()


def run_probe(machine: Machine) -> Probed:
    """Prove and measure all visible GPUs of this machine; bounded in time, never raises."""
    count = len(machine.gpus)
    if count < 2:
        text = f"the probe needs two GPUs and this machine shows {count}."
        return Probed(notes=(Finding("info", "probe-not-run", text, "R25"),))
    from fastverify.comm.peer_children import proved

    try:
        proof = proved(range(count), key="doctor")
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        text = (
            f"the peer probe could not run ({reason.rstrip('.')}); serve on NCCL until it passes."
        )
        return Probed(notes=(Finding("unknown", "probe-failed", text, "R25"),))
    found = from_proof(proof)
    speeds = measure(range(count)) if proof.passed else None
    if speeds is None:
        if not proof.passed:
            return found
        text = "copies between GPUs could not be timed; run `fastverify doctor --probe` when idle."
        note = Finding("unknown", "pair-speed-unread", text, "facts 12")
        return msgspec.structs.replace(found, notes=(*found.notes, note))
    measured = msgspec.structs.replace(found.measured, pair_gbs=speeds[0], pair_us=speeds[1])
    return msgspec.structs.replace(found, measured=measured)


def from_proof(proof: Proof) -> Probed:
    """A proof as a matrix of pairs; failures that name no pair become findings of their own."""
    cells: list[list[Cell]] = [
        ["-" if i == j else "ok" for j in range(proof.world)] for i in range(proof.world)
    ]
    notes = []
    for failure in proof.failures:
        pair = _PAIR.search(failure)
        i, j = (int(n) for n in pair.groups()) if pair else (0, 0)
        if pair is None or i == j or max(i, j) >= proof.world:
            text = f"the peer probe failed: {failure.rstrip('.')}; serve on NCCL without peers."
            notes.append(Finding("fail", "peers-not-delivered", text, "R25"))
            cells = [[c if c == "-" else "unread" for c in row] for row in cells]
        else:
            cells[i][j] = _cell(failure)
    probe = tuple(tuple(row) for row in cells)
    return Probed(Measured(probe=probe), tuple(notes))


def _cell(failure: str) -> Cell:
    if "could not write" not in failure:
        return "wrong"
    return "timeout" if re.search(r"time|answer", failure, re.IGNORECASE) else "unmappable"


def measure(devices: Sequence[int]) -> tuple[Table, Table] | None:
    """GB/s and us of copies for every ordered pair (row: source), None when it did not finish.

    Copies run on the copy engines, so they do not show whether loads and stores of kernels are
    staged (facts, section 8).
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe(duplex=False)
    child = spawn.Process(target=_measure, args=(theirs, tuple(devices)), daemon=True)
    child.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(MEASURE_SECONDS) else None
    except EOFError:
        return None
    finally:
        ours.close()
        if child.is_alive():
            child.kill()
        child.join(5.0)


def _measure(pipe: Connection, devices: Sequence[int]) -> None:
    try:
        pipe.send(_tables(devices))
    except (RuntimeError, ImportError, AssertionError):  # what torch raises without a working GPU
        pipe.send(None)
    pipe.close()


def _tables(devices: Sequence[int]) -> tuple[Table, Table]:
    tables = []
    for size, copies in ((LARGE_BYTES, LARGE_COPIES), (SMALL_BYTES, SMALL_COPIES)):
        rows = [
            tuple(0.0 if i == j else _copy_ms(i, j, size, copies) for j in devices) for i in devices
        ]
        tables.append(rows)
    large, small = tables
    return (
        tuple(tuple(LARGE_BYTES / ms / 1e6 if ms else 0.0 for ms in row) for row in large),
        tuple(tuple(ms * 1000 for ms in row) for row in small),
    )


def _copy_ms(source: int, target: int, size: int, copies: int) -> float:
    """Mean time of one copy, after a warm-up."""
    import torch

    here = torch.empty(size, dtype=torch.uint8, device=f"cuda:{source}")
    there = torch.empty(size, dtype=torch.uint8, device=f"cuda:{target}")
    with torch.cuda.device(source):
        for _ in range(3):
            there.copy_(here, non_blocking=True)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(copies):
            there.copy_(here, non_blocking=True)
        end.record()
        end.synchronize()
    return float(begin.elapsed_time(end)) / copies
