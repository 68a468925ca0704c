"""The teacher-forcing mask, against its definition pair by pair."""

from __future__ import annotations

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.masks import blocks
from tests.pairwise import name_of, pairwise, product
from tests.waiting import but

AXES = {
    "frames": (6, 7, 12, 13),
    "tokens": (1, 2),
    "size": (1, 2, 3),
    "window": (None, 2, 4),
    "sink": (0, 1, 3),
    "alone": (False, True),
    "shards": (1, 2, 3),
}


def fits(case: dict) -> bool:
    """Check whether the sink leaves room, and whether shards have whole blocks."""
    room = case["window"] is None or case["sink"] <= (case["window"] - 1) * case["size"]
    dealt = not case["alone"] and case["frames"] % (case["shards"] * case["size"]) == 0
    return room and (case["shards"] == 1 or dealt)


def mask_of(case: dict) -> M.TeacherForcing:
    sizes = case["frames"], case["tokens"], case["size"], case["window"]
    return M.TeacherForcing(*sizes, case["sink"], case["alone"], case["shards"])


def place(case: dict, row: int) -> tuple[bool, int]:
    """Return whether a token is of the noisy clip, and its frame."""
    share = case["frames"] * case["tokens"] // case["shards"]
    shard, within = divmod(row, 2 * share)
    noisy = within >= share
    return noisy, (shard * share + within - share * noisy) // case["tokens"]


def block(case: dict, frame: int) -> int:
    if case["alone"]:
        return 0 if frame == 0 else 1 + (frame - 1) // case["size"]
    return frame // case["size"]


def allowed(case: dict, q: int, k: int) -> bool:
    """Check whether query q attends to key k, in terms of frames and blocks."""
    (q_noisy, q_frame), (k_noisy, k_frame) = place(case, q), place(case, k)
    own, other = block(case, q_frame), block(case, k_frame)
    if k_noisy:
        return q_noisy and own == other
    if other > own or (q_noisy and other == own):
        return False
    end = sum(block(case, frame) <= own for frame in range(case["frames"]))
    budget = None if case["window"] is None else case["window"] * case["size"]
    if budget is None or end <= budget:
        return True
    return k_frame < case["sink"] or k_frame >= end - (budget - case["sink"])


def meaning(case: dict) -> np.ndarray:
    rows = range(2 * case["frames"] * case["tokens"])
    return np.array([[allowed(case, q, k) for k in rows] for q in rows])


@pytest.mark.parametrize("case", but(product(AXES, fits), pairwise(AXES, fits)), ids=name_of)
def test_what_is_said_is_allowed(case: dict) -> None:
    want, length = meaning(case), 2 * case["frames"] * case["tokens"]
    mask, at = mask_of(case).bind(length, length), np.arange(length)
    np.testing.assert_array_equal(np.asarray(mask.allowed(at, at))[0, 0], want)
    assert mask.allowed_pairs(length, length) == want.sum()
    padded = np.zeros((-(-length // 5) * 5, -(-length // 3) * 3), bool)
    padded[:length, :length] = want
    count = padded.reshape(-1, 5, padded.shape[1] // 3, 3).sum((1, 3))
    np.testing.assert_array_equal(blocks.count(mask, 5, 3, length, length), count)


@pytest.mark.parametrize("case", pairwise(AXES, fits)[::3], ids=name_of)
def test_with_other_masks(case: dict) -> None:
    """Row runs of a combined mask equal those computed from every query row."""
    length, teacher = 2 * case["frames"] * case["tokens"], mask_of(case)
    at = np.arange(length)
    for mask in (~teacher, teacher & ~M.BlockCausal(5), teacher | M.LocalWindow(3, 2)):
        bound = mask.bind(length, length)
        table = np.asarray(bound.allowed(at, at))
        pairs = np.broadcast_to(table, (1, 1, length, length)).sum()
        assert bound.allowed_pairs(length, length) == pairs


def test_an_h200_skips_by_it() -> None:
    """For Wan's 21 frames of 1,560 tokens, clean and noisy, less than a third is computed."""
    mask = ma.Stream(1560, 3, 4, sink=3).teacher_mask(21)
    call = ma.Call(1, 65_520, 65_520, 12, 12, 128, dtype="bfloat16", mask=mask)
    target = ma.Target.named("NVIDIA H200", (("fa4-jax", "0.1.0"),))
    plan = ma.plan(call, ma.AttentionConfig(attention="auto"), target=target)
    assert plan.kernel.name == "flash"
    tally = mask.block_tally(128, 128, 65_520, 65_520)
    assert 1 - tally[M.EMPTY] / sum(tally) < 0.25
    assert mask.most_keys() == 12 * 1560
