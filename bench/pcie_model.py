"""All-reduce time over PCIe and the rest of a Kimi-K2.5 step, from published numbers only.

Nothing here was measured by this project. Sizes are per-rank payloads in bytes, times in us.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

LINK_BYTES_PER_US = 56e3
CROSS_SWITCH_US = 1.07
SAME_SWITCH_US = 0.70
# One graph node and the row norm on top of the transfer, in a kernel that fuses both.
FUSED_NODE_US = 1.5
EXPERTS = 384
EXPERTS_PER_TOKEN = 8
EXPERT_READ_MS = 1.04
NEIGHBOUR_SHARE = 0.75
NORMS_MS = 0.305
# Non-communication time of a one-token step on 8x RTX PRO 6000, solved from 82 tok/s for an
# NCCL that takes 20.5 us (tuned) or 48.2 us (untuned) a call in a graph.
COMPUTE_MS = {"tuned": 9.7, "untuned": 6.3}


class Collective(msgspec.Struct, frozen=True):
    """Time of one all-reduce by payload. fused: the residual add and norm are in it.

    kind: `modelled` from published numbers, or `measured`.
    """

    name: str
    time_us: Callable[[float], float]
    fused: bool
    source: str
    kind: str = "modelled"


def one_shot_us(payload_bytes: float) -> float:
    """Every rank pushes all of it to all others; two switches share their uplinks by four."""
    return 16 * payload_bytes / LINK_BYTES_PER_US + CROSS_SWITCH_US


def two_shot_us(payload_bytes: float) -> float:
    """Reduce-scatter and all-gather, eight ranks on two switches whose uplinks limit both."""
    return 2 * (2 * payload_bytes / LINK_BYTES_PER_US + CROSS_SWITCH_US)


def island_us(payload_bytes: float) -> float:
    """Reduce inside each island of four, exchange across, gather inside: three hops."""
    inside = 0.75 * payload_bytes / LINK_BYTES_PER_US + SAME_SWITCH_US
    return 2 * inside + payload_bytes / LINK_BYTES_PER_US + CROSS_SWITCH_US


def line(first: tuple[float, float], second: tuple[float, float]) -> Callable[[float], float]:
    """The straight line through two (bytes, us) points."""
    slope = (second[1] - first[1]) / (second[0] - first[0])
    return lambda payload_bytes: first[1] + slope * (payload_bytes - first[0])


COLLECTIVES = (
    Collective(
        "nccl-untuned",
        line((14336, 48.2), (43008, 48.4)),
        False,
        "dual Turin without graph XML, 48 us at 32 KB",
    ),
    Collective(
        "nccl-tuned", line((14336, 20.5), (43008, 22.7)), False, "8 GPUs, 20-25 us at 16-56 KB"
    ),
    Collective(
        "one-stage",
        line((14336, 11.8), (172032, 59.4)),
        False,
        "one-stage kernel with residual add on 8 GPUs, 11.8 us at 14 KB and 59.4 us at 168 KB",
    ),
    Collective(
        "pcie-ipc",
        line((12288, 5.3), (98304, 15.3)),
        False,
        "docstring of SGLang's PCIe IPC all-reduce, 5.3 us at 12 KiB and 15.3 us at 96 KiB",
    ),
    Collective(
        "fused-bound",
        lambda payload_bytes: two_shot_us(payload_bytes) + FUSED_NODE_US,
        True,
        "two-shot bound on two switches plus one graph node",
    ),
)


def collective(name: str) -> Collective | None:
    """The collective called name, or None."""
    return next((c for c in COLLECTIVES if c.name == name), None)


def expected_experts(rows: int, experts: int = EXPERTS, each: int = EXPERTS_PER_TOKEN) -> float:
    """Distinct experts that `rows` independent tokens touch: E = N (1 - (1 - k/N)^rows)."""
    return experts * (1 - (1 - each / experts) ** rows)


def compute_ms(case: str, rows: int) -> float:
    """Non-communication time of a step with `rows` tokens on 8x RTX PRO 6000, modelled.

    case: `tuned` or `untuned`, the reading of the 82 tok/s baseline. Expert reads grow with the
    distinct experts, by three quarters of what independent tokens would touch.
    """
    growth = expected_experts(rows) / EXPERTS_PER_TOKEN - 1
    return COMPUTE_MS[case] + EXPERT_READ_MS * NEIGHBOUR_SHARE * growth


def draft_ms(rows: int) -> float:
    """Draft, draft-extend and host seams for a verify of `rows` tokens, modelled.

    Chosen so that a four-token verify falls in the 15.6-21.0 ms an iteration takes in vLLM.
    """
    return 1.0 + 0.6 * (rows - 1) if rows > 1 else 0.0
