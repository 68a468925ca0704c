"""Runs of query rows: counts from them equal those from every query row, at any length."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.context_parallel.ring.zigzag import ChunkLayout
from maxattn.errors import Unsupported
from maxattn.masks import blocks, row_runs
from tests.fuzz.masks import Sizes, draw_tree
from tests.masks.definitions import calls
from tests.waiting import but

LONG = 10_000_000
PACKAGES = (("fa4-jax", "0.1.0"), ("tokamax", "0.0.17"), ("transformer-engine-jax", "2.20.2"))
HIDDEN = ~(M.KeyLimit(90) & ~M.KeyLimit(60))
MASKS = {
    "causal": M.Causal(),
    "window": M.LocalWindow(4000, 300),
    "block causal": M.BlockCausal(1560),
    "small blocks": M.BlockSlidingWindow(3, 2) | M.KeyLimit(5),
    "large blocks": M.BlockSlidingWindow(300_000, 2),
    "many": HIDDEN & M.Causal() & ~M.BlockSlidingWindow(100, 3),
    "video": M.VideoMask(625, 16_000, 3, window=3, sink=2, first_frame_alone=True),
    "small video": M.VideoMask(LONG // 16, 16, 3, 2, 1) & ~M.BlockCausal(5),
    "lengths": M.Causal() & M.KeyPadding(np.full(1, LONG - 5)).form(),
}  # fmt: skip


def _drawn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(seed)
    t, s = rng.choice([50, 400, 1500, 2400, 4096]), rng.choice([77, 600, 3000])
    s = t if rng.random() < 0.6 else s
    mask = eval(draw_tree(rng, Sizes(1, t, s, 1, 1, 8), data=False).text(), {"M": M})
    mask = mask.bind(t, s) if t <= s else M.Causal(3) & ~M.BlockCausal(7, 1)
    grid = rng.choice([17, 64, 128, t]), rng.choice([5, 64, 100, s]), t, s
    layout = ChunkLayout(rng.choice([1, 2, 3, 8]), rng.choice([1, 2]))
    padded = tuple(-(-n // layout.chunks) * layout.chunks for n in (t, s))
    counted = blocks.count(mask, *grid), blocks.tally(mask, *grid), blocks.pairs(mask, t, s)
    work, hops = layout.work(mask, *padded), layout.hops(mask, *padded)
    with monkeypatch.context() as every_row:
        every_row.setattr(row_runs, "_way", lambda *_: None)
        whole = blocks.count(mask, *grid)
        chunks = blocks.count(mask, *(n // layout.chunks for n in padded), *padded)
    np.testing.assert_array_equal(counted[0], whole, str(mask))
    kinds = np.where(whole == 0, M.EMPTY, np.where(whole == blocks.areas(*grid), M.FULL, M.MIXED))
    assert counted[1:] == (tuple(np.bincount(kinds.ravel(), minlength=3)), whole.sum()), mask
    n, each = layout.ring_size, layout.chunks_per_rank
    rank, hop, of = *np.ogrid[:n, :n], layout.chunk
    by_rank = np.zeros((n, n), chunks.dtype)
    for i, j in np.ndindex(each, each):
        by_rank += chunks[of(rank, i), of((rank - hop) % n, j)]
    np.testing.assert_array_equal(work, by_rank, str(mask))
    assert hops == tuple(h for h in range(layout.ring_size) if not h or by_rank[:, h].any()), mask


@pytest.mark.parametrize("seed", but(range(8), [0, 1, 2]))
def test_runs_of_drawn_masks_count_as_rows_do(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(40):
        _drawn(100 * seed + i, monkeypatch)


SLOW = pytest.mark.slow
PLANNED = [
    *((name, None) for name in MASKS),
    *(pytest.param(name, 64, marks=SLOW) for name in MASKS),
    *(pytest.param(name, 2048, marks=() if name == "video" else SLOW) for name in MASKS),
]


@pytest.mark.parametrize(("name", "devices"), PLANNED)
def test_plans_of_ten_million_tokens_take_few_steps(name: str, devices: int | None, monkeypatch):
    """The test counts computed rows and function calls instead of measuring time."""
    rows, intervals = 0, M.Mask.intervals

    def counted(mask: M.Mask, q_pos: np.ndarray, *rest: Any) -> Any:
        nonlocal rows
        rows += np.size(q_pos)
        return intervals(mask, q_pos, *rest)

    monkeypatch.setattr(M.Mask, "intervals", counted)
    mesh = {"context": devices} if devices else None
    for kind in ("NVIDIA H200", "TPU v5p"):
        target = ma.Target.named(kind, PACKAGES)
        # Among 2048 devices auto plans the others too.
        for strategy in ("auto", "ring", "ulysses_ring") if devices == 64 else ("auto",):
            config = ma.AttentionConfig(context_parallel=strategy, fallback="warn")
            call = ma.Call(1, LONG, LONG, 8, 8, 64, "bfloat16", mask=MASKS[name])
            rows = 0
            steps = calls(lambda c=call, s=config, t=target: ma.plan(c, s, mesh, t).explain())
            assert rows < LONG / 20 and steps < LONG / 10, (kind, strategy, rows, steps)


def test_lists_of_more_tiles_than_the_bound_are_refused() -> None:
    target = ma.Target.named("NVIDIA H200", PACKAGES)

    def planned(length: int) -> ma.Plan:
        call = ma.Call(1, length, length, 8, 8, 64, "bfloat16", mask=M.BlockCausal(1560))
        return ma.plan(call, ma.AttentionConfig(attention="flash"), None, target)

    assert planned(131_072).kernel.name == "flash"
    with pytest.raises(Unsupported, match="block-sparse lists have up to 134217728 tiles"):
        planned(2_097_152)
