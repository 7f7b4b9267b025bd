"""What a fused all-reduce must give, computed apart from the kernels, in torch."""

from __future__ import annotations

import torch

EPS = 1e-6


def total(inputs: list[torch.Tensor]) -> torch.Tensor:
    """Sum in rank order in fp32, rounded once to the type of the inputs."""
    return ordered(inputs).to(inputs[0].dtype)


def total_by_island(inputs: list[torch.Tensor]) -> torch.Tensor:
    """(r0 + r1 + r2 + r3) + (r4 + r5 + r6 + r7) in fp32, rounded once."""
    return (ordered(inputs[:4]) + ordered(inputs[4:])).to(inputs[0].dtype)


def ordered(inputs: list[torch.Tensor]) -> torch.Tensor:
    """fp32 sum, one input after the other."""
    result = inputs[0].float()
    for other in inputs[1:]:
        result = result + other.float()
    return result


def new_residual(summed: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The rounded sum plus the residual, rounded."""
    return (summed.float() + residual.float()).to(residual.dtype)


def norm(residual: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """RMSNorm of the rounded residual in fp64, not rounded."""
    value = residual.double()
    return value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.double()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit, except that any NaN equals any other."""
    nan = left.isnan() & right.isnan()
    return bool(((left.view(torch.int16) == right.view(torch.int16)) | nan).all())


def first_difference(left: torch.Tensor, right: torch.Tensor) -> str:
    """Where two tensors of one shape first differ, and by what."""
    nan = left.isnan() & right.isnan()
    wrong = ((left.view(torch.int16) != right.view(torch.int16)) & ~nan).nonzero()
    if not len(wrong):
        return "equal"
    at = tuple(wrong[0].tolist())
    return f"{len(wrong)} differ, first at {at}: {left[at].item()!r} and {right[at].item()!r}"


def real_inputs(
    world: int, rows: int, hidden: int, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """Normal values of magnitude 1e-3 to 1e2 with special rows where there is room.

    Row 1 is all zero, row 2 negative zero, row 3 has an infinity, row 4 holds the arrival mark
    itself (NaNs of all ones) on one rank.
    """
    generator = torch.Generator().manual_seed(seed)
    inputs = []
    for rank in range(world):
        scale = 10.0 ** torch.empty(rows, 1).uniform_(-3, 2, generator=generator)
        x = (torch.randn(rows, hidden, generator=generator) * scale).clamp(-6e3, 6e3).to(dtype)
        if rows > 1:
            x[1] = 0.0
        if rows > 2:
            x[2] = -0.0
        if rows > 3 and rank == world - 1:
            x[3, 5] = torch.inf
        if rows > 4 and rank == 0:
            x.view(torch.int16)[4] = -1
        inputs.append(x)
    return inputs


def whole_inputs(
    world: int, rows: int, hidden: int, dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """Whole numbers 0 to 15: every sum is exact, so the order does not matter."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, hidden)
    return [torch.randint(0, 16, shape, generator=generator).to(dtype) for _ in range(world)]
