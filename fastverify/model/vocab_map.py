"""The map from a drafter's own vocabulary to the target's. Pure, over loaded arrays.

An EAGLE-3 checkpoint stores `d2t`, one offset a draft id: draft id i means target id i + d2t[i]
(SGLang 0.5.23: models/llama_eagle3.py and models/kimi_k25_eagle3.py). `t2d` holds one flag a
target id, true where a draft id means it; SGLang never reads it, so that only a check like this
one notices when the two disagree.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastverify.errors import ConfigError

Array = NDArray[Any]


def check_map(
    d2t: Array, t2d: Array | None, *, draft_vocab: int, vocab: int, where: str
) -> tuple[str, ...]:
    """Refuse a vocabulary map that would draft wrong tokens.

    d2t: [draft_vocab] integers; t2d: [vocab] flags or None. where: the drafter's name.
    Returns warnings. Raises ConfigError with the counts of what does not match.
    """
    _check_sizes(d2t, t2d, draft_vocab, vocab, where)
    ids = d2t.astype(np.int64) + np.arange(draft_vocab)
    flags = None if t2d is None else t2d.astype(bool)
    if flags is not None:
        _check_agreement(ids, d2t, flags, where)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab))
    if outside.size:
        first = int(outside[0])
        raise ConfigError(
            f"{where} maps {outside.size} of {draft_vocab} draft ids outside the target's"
            f" vocabulary of {vocab}, the first being {first} -> {int(ids[first])}:"
            f" {_remedy(d2t, flags)}."
        )
    distinct = np.unique(ids).size
    if distinct < draft_vocab:
        raise ConfigError(
            f"{where} maps {draft_vocab} draft ids to only {distinct} different target ids:"
            f" {_remedy(d2t, flags)}."
        )
    identity = draft_vocab < vocab and not d2t.any()
    if flags is None and identity:
        raise ConfigError(
            f"{where} has a d2t of {draft_vocab} zeros and no t2d, which is a map that was never"
            " filled in: export the drafter again with its vocabulary map."
        )
    if flags is None:
        return (f"{where} has no t2d, so its d2t could not be checked against a second source.",)
    if identity:
        return (f"{where} drafts only the first {draft_vocab} ids of {vocab}, an unusual choice.",)
    return ()


def _check_sizes(d2t: Array, t2d: Array | None, draft_vocab: int, vocab: int, where: str) -> None:
    for name, found, size in (("d2t", d2t, draft_vocab), ("t2d", t2d, vocab)):
        if found is not None and found.shape != (size,):
            raise ConfigError(
                f"{where} has a {name} of shape {list(found.shape)} where [{size}] is needed: use"
                " the map that belongs to this drafter and target."
            )


def _check_agreement(ids: Array, d2t: Array, flags: Array, where: str) -> None:
    agree = _hits(ids, flags)
    marked = int(flags.sum())
    if agree == ids.size == marked:
        return
    outside = int(((ids < 0) | (ids >= flags.size)).sum())
    raise ConfigError(
        f"{where} has a d2t and a t2d that disagree: {agree} of {ids.size} draft ids land on one of"
        f" the {marked} target ids that t2d marks, and {outside} lie outside the target's"
        f" vocabulary of {flags.size}: {_remedy(d2t, flags)}."
    )


def _hits(ids: Array, flags: Array) -> int:
    """How many ids are inside the target's vocabulary and marked there."""
    inside = ids[(ids >= 0) & (ids < flags.size)]
    return int(flags[inside].sum())


def _remedy(d2t: Array, flags: Array | None) -> str:
    """The likely cause: some exporters write target ids where offsets belong."""
    ids = d2t.astype(np.int64)
    if (
        ids.size > 1
        and (np.diff(ids) > 0).all()
        and (flags is None or _hits(ids, flags) == ids.size)
    ):
        return "d2t seems to hold target ids, so subtract each entry's own index from it"
    return "the map belongs to another drafter or is damaged, so export or download it again"
