"""The interface of every all-reduce backend, and the one that picks among them by table.

The operation, for x of rank r, as torch (all ranks get the same bits):

    total = sum over ranks of x                     # fp32, rounded once
    new = total + residual                          # out of place
    return rms_norm(new) * weight, new
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch

from fastverify.comm.workspace import PeerError
from fastverify.errors import ConfigError

Fused = tuple[torch.Tensor, torch.Tensor]


class Call(msgspec.Struct, frozen=True, order=True):
    """What a backend must know to say whether it can take a call.

    fused: with residual add and RMSNorm. dtype: name as torch prints it, without `torch.`.
    """

    rows: int
    hidden: int
    dtype: str = "bfloat16"
    fused: bool = True
    contiguous: bool = True

    def __str__(self) -> str:
        kind = "fused" if self.fused else "plain"
        layout = "" if self.contiguous else ", not contiguous"
        return f"{self.rows} x {self.hidden} {self.dtype}, {kind}{layout}"


def call_of(
    x: torch.Tensor, residual: torch.Tensor | None = None, weight: torch.Tensor | None = None
) -> Call:
    """The call that these tensors make; with `residual` it is a fused one.

    Raises ConfigError when the tensors do not belong together: that is misuse, not a decline.
    """
    fused = residual is not None
    if residual is not None and weight is not None:
        if residual.shape != x.shape or weight.shape != x.shape[-1:]:
            raise ConfigError(
                f"Fused all-reduce got x {tuple(x.shape)}, residual {tuple(residual.shape)} and"
                f" weight {tuple(weight.shape)}: residual must match x, weight its last dimension."
            )
        if not x.dtype == residual.dtype == weight.dtype:
            raise ConfigError(
                f"Fused all-reduce got x {x.dtype}, residual {residual.dtype} and weight"
                f" {weight.dtype}: pass all three in one type."
            )
    hidden = x.shape[-1]
    tensors = [tensor for tensor in (x, residual, weight) if tensor is not None]
    return Call(
        rows=x.numel() // hidden if hidden else 0,
        hidden=hidden,
        dtype=str(x.dtype).removeprefix("torch."),
        fused=fused,
        contiguous=all(tensor.is_contiguous() for tensor in tensors),
    )


class Collective(abc.ABC):
    """A backend. Every rank makes the same calls in the same order, on one stream.

    A call that the backend cannot take returns None before anything is touched, and does so on
    all ranks, because `why_not` depends on nothing but the call and what the ranks agreed on.
    """

    name: str

    @abc.abstractmethod
    def why_not(self, call: Call) -> str | None:
        """Why this backend cannot take a call, or None when it can."""

    def supports(self, call: Call) -> bool:
        """True when the backend takes the call."""
        return self.why_not(call) is None

    @abc.abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sum of x over ranks in a new tensor, or None."""

    @abc.abstractmethod
    def all_reduce_residual_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Fused | None:
        """(norm, new residual) in new tensors, or None. Inputs stay as they are."""

    def prepare(self, calls: Sequence[Call]) -> None:  # noqa: B027
        """Compile and load what these calls need; collective, before any graph is captured."""

    def check(self) -> None:  # noqa: B027
        """Raise PeerError when a call since the last check did not complete. Waits."""

    def close(self) -> None:  # noqa: B027
        """Give memory back; collective, and nothing may be captured or running any more."""


class Chosen(Collective):
    """Takes each call to the backend that the table names for it, or declines.

    choice: name of a backend by call, or `leave` for calls that the caller should make itself;
    all ranks must hold the same. A call that is not in it goes by the entry with the next larger
    number of rows of the same kind; past the largest it is declined.
    """

    name = "chosen"

    def __init__(
        self, backends: Iterable[Collective], choice: Mapping[Call, str], leave: str = "nccl"
    ) -> None:
        self._backends = {backend.name: backend for backend in backends}
        unknown = sorted(set(choice.values()) - self._backends.keys() - {leave})
        if unknown:
            raise ConfigError(
                f"The table names {', '.join(unknown)}, but only"
                f" {', '.join(sorted(self._backends)) or 'nothing'} can run here: tune again."
            )
        self._choice = dict(sorted(choice.items()))

    def backend_for(self, call: Call) -> Collective | None:
        """The backend of the table that takes a call."""
        for known, name in self._choice.items():
            same = (known.hidden, known.dtype, known.fused) == (call.hidden, call.dtype, call.fused)
            if same and known.rows >= call.rows:
                backend = self._backends.get(name)
                return backend if backend is not None and backend.supports(call) else None
        return None

    def why_not(self, call: Call) -> str | None:
        return None if self.backend_for(call) else f"no backend was chosen for {call}"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        backend = self.backend_for(call_of(x))
        return backend.all_reduce(x) if backend else None

    def all_reduce_residual_rmsnorm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Fused | None:
        backend = self.backend_for(call_of(x, residual, weight))
        return backend.all_reduce_residual_rmsnorm(x, residual, weight, eps) if backend else None

    def prepare(self, calls: Sequence[Call]) -> None:
        for name, backend in sorted(self._backends.items()):
            mine = [
                call for call in calls if (found := self.backend_for(call)) and found.name == name
            ]
            if mine:
                backend.prepare(mine)

    def check(self) -> None:
        for backend in self._backends.values():
            backend.check()

    def close(self) -> None:
        errors = []
        for _, backend in sorted(self._backends.items()):
            try:
                backend.close()
            except PeerError as error:
                errors.append(str(error))
        if errors:
            raise PeerError("; ".join(errors))
