"""The map from draft ids to target ids: sound ones pass, every fault is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastverify.model.drafter import check_drafter
from fastverify.model.vocab_map import check_map
from tests.checkpoints import (
    ABSENT,
    DRAFT_VOCAB,
    GOAL,
    check,
    draft_config,
    draft_tensors,
    good_map,
    refuse,
    write_model,
)
from tests.sentences import check_refused

BOTH = pytest.mark.parametrize("kind", ["mha", "mla"])


@BOTH
def test_a_reduced_vocabulary_needs_a_map(tmp_path: Path, kind: str) -> None:
    tensors = draft_tensors(kind, d2t=ABSENT)
    refuse(tmp_path, draft_config(kind), tensors, DRAFT_VOCAB, 96, "no d2t")


def test_a_map_without_its_twin_is_checked_alone_and_said_so(tmp_path: Path) -> None:
    facts = check(tmp_path, draft_config("mha"), draft_tensors("mha", t2d=ABSENT))
    assert facts.map_checked and any("no t2d" in warning for warning in facts.warnings)


@pytest.mark.parametrize("dtype", [np.int16, np.int32, np.int64])
def test_any_whole_type_holds_a_map(tmp_path: Path, dtype: Any) -> None:
    d2t, t2d = good_map()
    tensors = draft_tensors("mla", d2t=d2t.astype(dtype), t2d=t2d.astype(np.uint8))
    assert check(tmp_path, draft_config("mla"), tensors).warnings == ()


def test_a_map_of_fractions_is_refused(tmp_path: Path) -> None:
    tensors = draft_tensors("mha", d2t=good_map()[0].astype(np.float32))
    name = write_model(tmp_path, draft_config("mha"), tensors)
    check_refused(check_drafter, GOAL, name, says=("d2t", "F32", "I64"))


def test_252_of_32000_positions() -> None:
    """The deployment that lost days: a sound d2t beside the t2d of another drafter."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(163840, 32000, replace=False))
    others = np.setdiff1d(np.arange(163840), ids)
    flags = np.zeros(163840, bool)
    flags[ids[:252]] = True
    flags[rng.choice(others, 32000 - 252, replace=False)] = True
    d2t = ids - np.arange(32000)
    says = ("d", "252 of 32000", 32000)
    check_refused(check_map, d2t, flags, draft_vocab=32000, vocab=163840, where="d", says=says)


def test_target_ids_in_place_of_offsets_are_recognised() -> None:
    d2t, flags = good_map()
    ids = d2t + np.arange(DRAFT_VOCAB)
    for t2d in (flags, None):
        message = check_refused(
            check_map,
            ids,
            t2d,
            draft_vocab=DRAFT_VOCAB,
            vocab=96,
            where="d",
            says=(DRAFT_VOCAB, 96),
        )
        assert "hold target ids" in message


def test_zeros_are_no_map_unless_t2d_says_so() -> None:
    zeros = np.zeros(DRAFT_VOCAB, np.int64)
    first = np.arange(96) < DRAFT_VOCAB
    sizes: dict[str, Any] = {"draft_vocab": DRAFT_VOCAB, "vocab": 96, "where": "d"}
    check_refused(check_map, zeros, None, **sizes, says=("zeros", DRAFT_VOCAB))
    check_refused(check_map, zeros, good_map()[1], **sizes, says=("6 of 24", 96))
    check_refused(check_map, zeros, np.ones(96, bool), **sizes, says=("24 of 24", "96 target ids"))
    assert len(check_map(zeros, first, **sizes)) == 1
    assert check_map(np.zeros(96, int), None, draft_vocab=96, vocab=96, where="d")


@pytest.mark.parametrize("name", ["d2t", "t2d"])
@pytest.mark.parametrize("shape", [(23,), (97,), (24, 1), ()])
def test_maps_of_another_size_are_refused(name: str, shape: tuple[int, ...]) -> None:
    maps = dict(zip(("d2t", "t2d"), good_map(), strict=True))
    size = maps[name].size
    maps[name] = np.zeros(shape, np.int64)
    says = (name, "shape", size)
    check_refused(
        check_map, *maps.values(), draft_vocab=DRAFT_VOCAB, vocab=96, where="d", says=says
    )


VOCABS = st.integers(2, 200).flatmap(
    lambda vocab: st.tuples(st.just(vocab), st.sets(st.integers(0, vocab - 1), min_size=1))
)


@given(VOCABS, st.randoms(use_true_random=False))
def test_every_sound_map_passes_in_any_order(case: tuple[int, set[int]], random: Any) -> None:
    vocab, chosen = case
    ids = sorted(chosen)
    random.shuffle(ids)
    flags = np.isin(np.arange(vocab), ids)
    d2t = np.array(ids) - np.arange(len(ids))
    warnings = check_map(d2t, flags, draft_vocab=len(ids), vocab=vocab, where="d")
    assert len(warnings) == (len(ids) < vocab and not d2t.any())


@given(VOCABS, st.data())
def test_every_single_fault_is_refused(case: tuple[int, set[int]], data: Any) -> None:
    """One entry moved, doubled or sent outside; one flag turned: with t2d each is found."""
    vocab, chosen = case
    ids = np.array(sorted(chosen))
    flags = np.isin(np.arange(vocab), ids)
    size = {"draft_vocab": ids.size, "vocab": vocab, "where": "d"}
    at = data.draw(st.integers(0, ids.size - 1))
    wrong = data.draw(st.integers(-3, vocab + 3).filter(lambda value: value != ids[at]))
    moved = ids.copy()
    moved[at] = wrong
    check_refused(check_map, moved - np.arange(ids.size), flags, **size, says=("d", ids.size))
    turned = flags.copy()
    turned[data.draw(st.integers(0, vocab - 1))] ^= True
    check_refused(check_map, ids - np.arange(ids.size), turned, **size, says=(int(turned.sum()),))


@given(VOCABS, st.data())
def test_without_t2d_ids_outside_and_twice_are_refused(
    case: tuple[int, set[int]], data: Any
) -> None:
    vocab, chosen = case
    ids = np.array(sorted(chosen))
    at = data.draw(st.integers(0, ids.size - 1))
    beyond = st.one_of(st.integers(-9, -1), st.integers(vocab, vocab + 9))
    taken = [int(value) for n, value in enumerate(ids) if n != at]
    ids[at] = data.draw(st.one_of(beyond, st.sampled_from(taken)) if taken else beyond)
    d2t = ids - np.arange(ids.size)
    size = {"draft_vocab": ids.size, "vocab": vocab, "where": "d"}
    inside = bool(0 <= ids[at] < vocab)
    says = (ids.size - 1, "different") if inside else (vocab, f"{at} -> {ids[at]}".split()[0])
    check_refused(check_map, d2t, None, **size, says=says)
