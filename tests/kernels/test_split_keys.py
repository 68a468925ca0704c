"""A forward that leaves SMs idle takes the keys of its last queries in splits."""

from __future__ import annotations

import heapq
from functools import partial
from itertools import pairwise, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.kernels.base import Inputs, Result
from maxattn.kernels.fa4 import kernel as fa4_kernel
from maxattn.kernels.fa4 import primitives, split_keys, split_keys_forward, split_keys_lists
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fa4.launch_order import START
from maxattn.kernels.fa4.split_keys import (
    BYTES_A_US,
    MERGE_US,
    ForwardWork,
    KeySplits,
    end_of,
    split_for,
    split_of,
)
from maxattn.kernels.fa4.split_keys_forward import merged
from maxattn.kernels.fa4.split_keys_kernel import SplitGrid
from maxattn.kernels.fa4.tile_sizes import Tile
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.tools.model_shapes import SHAPES
from tests.reference import Answer, attention64, error

H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))


def ends(blocks: list[float], sms: int) -> float:
    """Return when the last thread block ends, if each SM takes the next as soon as it is free."""
    free = [0.0] * sms
    for each in blocks:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def drawn_grids() -> list[SplitGrid]:
    rng, made = np.random.default_rng(0), []
    for _ in range(60):
        tiles = int(rng.integers(1, 9))
        lanes, splits = int(rng.integers(1, 14)), int(rng.integers(2, 9))
        made.append(SplitGrid(tiles, lanes, int(rng.integers(1, tiles + 1)), splits))
    return [*made, SplitGrid(1, 1, 1, 2), SplitGrid(5, 3, 5, 4)]


@pytest.mark.parametrize("grid", drawn_grids(), ids=lambda g: "x".join(map(str, g)))
def test_all_tiles_of_all_queries_are_taken_once(grid: SplitGrid) -> None:
    for steps in (grid.splits, grid.splits + 1, 37):
        seen = np.zeros((grid.tiles, grid.lanes, steps), int)
        at = np.arange(grid.blocks)
        tile, lane = grid.place(at, np)
        for n, (t, row, lo, hi) in enumerate(
            zip(tile, lane, *grid.keys(at, steps, np), strict=True)
        ):
            assert hi > lo, "every thread block has keys"
            assert (hi - lo == steps) == (n < grid.whole) or steps == 1
            assert t < grid.first or 0 <= grid.split(n) < grid.splits
            seen[t, row, lo:hi] += 1
        assert (seen == 1).all()


def test_the_first_thread_blocks_are_the_whole_ones_head_by_head() -> None:
    grid = SplitGrid(tiles=5, lanes=3, tail=2, splits=4)
    tile, lane = grid.place(np.arange(grid.blocks), np)
    assert grid.whole == 9 and grid.blocks == 9 + 2 * 3 * 4
    assert list(zip(tile, lane, strict=True))[:4] == [(0, 0), (1, 0), (2, 0), (0, 1)]
    late = list(zip(tile[9:], lane[9:], strict=True))
    assert late[:6] == [(3, 0), (4, 0), (3, 1), (4, 1), (3, 2), (4, 2)] == late[6:12]


@pytest.mark.parametrize("sms", [132, 78])
def test_the_end_is_that_of_a_queue(sms: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        count, left = int(rng.integers(0, 500)), int(rng.integers(1, 500))
        long, short = int(rng.integers(20, 300)), int(rng.integers(1, 20))
        played = ends([long] * count + [short] * left, sms)
        assert end_of((count, long), (left, short), sms) == played


@pytest.mark.parametrize("sms", [132, 78])
def test_splits_end_sooner(sms: int) -> None:
    """Played thread block by thread block, in their real lengths, they gain the margin."""
    rng, gains = np.random.default_rng(0), 0
    for _ in range(120):
        tiles, lanes, steps = (int(rng.integers(1, most)) for most in (40, 60, 500))
        work = ForwardWork(tiles, lanes, steps, 1.65, 0, 65536, START, sms)
        tail = split_of(work)
        gains += tail is not None
        if tail is None:
            continue
        grid = SplitGrid(tiles, lanes, *tail)
        lo, hi = grid.keys(np.arange(grid.blocks), steps, np)
        merge = MERGE_US + 2 * (grid.blocks - grid.whole) * 65536 / BYTES_A_US
        played = 1.65 * ends((hi - lo + START).tolist(), sms) + merge
        assert played - 1e-6 <= work.cost(tail) <= min(0.95 * work.unsplit, work.unsplit - 2)
    assert 20 < gains < 100


SMALL_WORKS = list(product((1, 2, 3, 5, 13, 37), (1, 8, 12, 40), (1, 2, 16, 256)))


@pytest.mark.parametrize("sizes", SMALL_WORKS, ids=lambda x: "x".join(map(str, x)))
def test_what_is_split_is_the_best_way(sizes: tuple[int, int, int]) -> None:
    work = ForwardWork(*sizes, 1.65, 65536, 65536)
    ways = [
        KeySplits(n, p) for n in range(1, sizes[0] + 1) for p in range(2, min(32, sizes[2]) + 1)
    ]
    costs, tail = [work.cost(way) for way in ways], split_of(work)
    if tail is not None:
        assert work.cost(tail) <= 1.01 * min(costs)
    else:
        assert min(costs, default=np.inf) > min(0.95 * work.unsplit, work.unsplit - 2)


def test_few_queries_are_split() -> None:
    frame, five = (1, 1560, 12, 128), (1, 4680, 12, 128)
    keys = 1, 32760, 12, 128
    assert split_for(five, keys) == KeySplits(4, 8)  # 33 tiles of 12 heads are 3.0 waves of 132
    assert split_for(frame, keys) == KeySplits(2, 5)
    assert split_for((1, 4680, 40, 128), (1, 32760, 8, 128)), "query heads may share keys"
    assert split_for((1, 256, 16, 64), (1, 65536, 16, 64)) == KeySplits(2, 4)  # all of them
    assert split_for((2, 1024, 8, 128), (2, 16384, 8, 128)) is None, "128 tiles for 132 SMs"
    assert split_for(five, keys, 78) != split_for(five, keys)
    assert split_for((1, 64, 8, 64), (1, 0, 8, 64)) is None


def test_shapes_whose_waves_are_full_are_not_split() -> None:
    full = {name: shape.call() for name, shape in SHAPES.items()}
    # Blocks of a stream have few queries for many keys: theirs are what is split.
    whole = {n for n, call in full.items() if call.role == "cross" or call.q_len == call.kv_len}
    full = {name: call for name, call in full.items() if call.mask.is_full and name in whole}
    assert len(full) > 8
    for name, call in full.items():
        queries = call.batch, call.q_len, call.heads, call.head_dim
        assert (
            split_for(queries, (call.batch, call.kv_len, call.kv_heads, call.head_dim)) is None
        ), name


# ---- the merge -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(40,), (0,), (77,), (7, 8, 61), (0, 20, 20, 77)])
@pytest.mark.parametrize("level", [0.0, 300.0])
def test_splits_are_merged_as_in_float64(cuts: tuple[int, ...], level: float) -> None:
    """Some have no keys, and LSE -inf; a level of scores that exp would overflow at cancels."""
    rng, bounds = np.random.default_rng(1), [0, *cuts, 77]
    q, k, v = (rng.normal(size=(2, length, 3, 8)) for length in (9, 77, 77))
    level_bias = np.full((1, 1, 1, 77), level)
    want = attention64(q, k, v, bias=level_bias)
    parts = [
        attention64(q, k[:, a:b], v[:, a:b], bias=level_bias[..., a:b])
        if b > a
        else Answer(np.full((2, 9, 3, 8), np.nan), np.full((2, 3, 9), -np.inf), q, q, q, None)
        for a, b in pairwise(bounds)
    ]
    outs = jnp.asarray(np.stack([part.out for part in parts]), jnp.float32)
    lses = jnp.asarray(np.stack([part.lse.swapaxes(1, 2) for part in parts]), jnp.float32)
    out, lse = jax.jit(merged)(outs, lses)
    assert error(out, want.out) < 1e-6 + level * 2e-8 and error(lse, want.lse) < 1e-6


@pytest.mark.parametrize("splits", [2, 3])
def test_what_sees_nothing_anywhere_stays_so(splits: int) -> None:
    out, lse = merged(jnp.ones((splits, 1, 2, 1, 4)), jnp.full((splits, 1, 2, 1), -jnp.inf))
    assert (out == 0).all() and (lse == -jnp.inf).all()


# ---- what is handed to the kernel, and what becomes of its results -------------------------------


def launched(inputs: PieceInputs, scale: float, tile: Tile, grid: SplitGrid) -> list[jax.Array]:
    """Compute in jnp what each thread block writes; what none writes is NaN."""
    q, k, v = (x.astype(jnp.float32) for x in split_keys_forward.operands(inputs))
    (b, t, n, h), s = q.shape, inputs.k.shape[1]
    k, v = (x.reshape(b, s, *x.shape[-2:]) for x in (k, v))
    q = jnp.pad(q, ((0, 0), (0, grid.tiles * tile.queries - t), (0, 0), (0, 0)))
    q, group = q.reshape(b, grid.tiles, tile.queries, n, h), n // k.shape[2]
    real: Any = jnp.full(b, s) if inputs.lengths is None else inputs.lengths

    def block(at: jax.Array) -> tuple[jax.Array, jax.Array]:
        row, lane = grid.place(at, jnp)
        batch, head = lane // n, lane % n
        lo, hi = grid.keys(at, -(-real[batch] // tile.keys), jnp)
        key = jnp.arange(s)
        seen = (key >= lo * tile.keys) & (key < hi * tile.keys)  # a split may have no keys: NaN
        scores = scale * q[batch, row, :, head] @ k[batch, :, head // group].T
        scores = jnp.where(seen & (key < real[batch]), scores, -jnp.inf)
        lse = jax.nn.logsumexp(scores, -1)
        return jnp.exp(scores - lse[:, None]) @ v[batch, :, head // group], lse

    at = np.arange(grid.blocks)
    return written(inputs.q, tile, grid, *jax.vmap(block)(at))


def written(q: Any, tile: Tile, grid: SplitGrid, out: Any, lse: Any) -> list[jax.Array]:
    """Lay out and lse of all thread blocks into the arrays that they write."""
    (b, t, n, h), at = q.shape, np.arange(grid.blocks)
    row, lane = grid.place(at, np)
    batch, head, rows = lane // n, lane % n, tile.queries
    splits, *whole = split_keys_forward._results(q, tile, grid)[::2]
    tail = jnp.full((*splits.shape[:2], grid.tail, rows, *splits.shape[3:]), jnp.nan)
    tail_lse = jnp.full((*splits.shape[:2], n, grid.tail, rows), jnp.nan)
    late = slice(grid.whole, None)
    here = grid.split(at)[late], batch[late], row[late] - grid.first
    tail = tail.at[*here, :, head[late], :h].set(out[late])
    tail_lse = tail_lse.at[*here[:2], head[late], here[2]].set(lse[late])
    made = [tail.reshape(splits.shape), tail_lse.reshape(*splits.shape[:2], n, -1).swapaxes(2, 3)]
    if not whole:
        return made
    here = batch[: grid.whole], row[: grid.whole]
    early, heads = jnp.full((b, grid.tiles, rows, n, h), jnp.nan), head[: grid.whole]
    early = early.at[*here, :, heads].set(out[: grid.whole]).reshape(b, -1, n, h)[:, :t]
    early_lse = jnp.full((b, n, grid.tiles, rows), jnp.nan)
    early_lse = early_lse.at[here[0], heads, here[1]].set(lse[: grid.whole])
    return [*made, early.astype(q.dtype), early_lse.reshape(b, n, -1)[:, :, :t]]


CASES = {
    "a tail": ((1, 300, 3, 128), 1000, 3, KeySplits(1, 3), None),
    "shared heads": ((2, 260, 4, 64), 500, 2, KeySplits(2, 2), None),
    "all": ((1, 40, 2, 72), 700, 2, KeySplits(1, 4), None),
    "lengths": ((3, 300, 2, 128), 600, 1, KeySplits(2, 4), [600, 1, 300]),
    "lengths of all": ((2, 70, 2, 64), 500, 2, KeySplits(1, 3), [129, 500]),
}  # fmt: skip


def drawn(name: str, seed: int = 0) -> tuple[tuple[jax.Array, ...], Answer]:
    """Make q, k, v, lengths in bfloat16, and what they give in float64."""
    (b, t, n, h), s, kv_heads, _, lengths = CASES[name]
    rng, shapes = np.random.default_rng(seed), ((t, n), (s, kv_heads), (s, kv_heads))
    q, k, v = (jnp.asarray(rng.normal(size=(b, *x, h)), "bfloat16") for x in shapes)
    real = np.full(b, s) if lengths is None else np.array(lengths)
    allowed = (np.arange(s) < real[:, None])[:, None, None]
    return (q, k, v, jnp.asarray(real, jnp.int32)), attention64(q, k, v, allowed)


@pytest.fixture
def splitting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernel's stand-in run, for the case in hand."""
    tails = {(case[0], case[1]): case[3] for case in CASES.values()}

    def tail(queries: Any, keys: Any, _sms: int) -> KeySplits | None:
        return tails.get((queries, keys[1]), KeySplits(1, 3))

    monkeypatch.setattr(split_keys_forward, "_launched", launched)
    monkeypatch.setattr(split_keys, "split_for", tail)
    monkeypatch.setattr(fa4_kernel, "knows_operands", lambda: True)


def run(name: str, *x: jax.Array) -> Any:
    q, k, v, lengths = x
    kernel = Fa4(q.shape[3] ** -0.5, launched=True)
    mask = ma.masks.Full() if CASES[name][4] is None else ma.masks.KeyPadding(lengths)
    return kernel.forward(Inputs(q, k, v, mask=mask.bind(q.shape[1], k.shape[1])))[:2]


@pytest.mark.usefixtures("splitting")
@pytest.mark.parametrize("name", CASES)
def test_splits_of_a_forward_are_put_together(name: str) -> None:
    x, want = drawn(name)
    out, lse = jax.jit(lambda *x: run(name, *x))(*x)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    assert error(out, want.out) < 1e-2 and error(lse, want.lse) < 1e-5


@pytest.mark.usefixtures("splitting")
@pytest.mark.parametrize("name", ["a tail", "lengths of all"])
def test_mapped_over(name: str) -> None:
    """The mapped axis is part of the batch, for which the splits are chosen."""
    made = [drawn(name, seed) for seed in (0, 1)]
    both = [jnp.stack(x) for x in zip(*(x for x, _ in made), strict=True)]
    found = jax.jit(jax.vmap(lambda *x: run(name, *x)))(*both)
    for i, (_, want) in enumerate(made):
        assert error(found[0][i], want.out) < 1e-2 and error(found[1][i], want.lse) < 1e-5


@pytest.mark.usefixtures("splitting")
def test_keys_past_the_lengths_are_not_seen() -> None:
    (q, k, v, lengths), want = drawn("lengths")
    real = (jnp.arange(k.shape[1]) < lengths[:, None])[..., None, None]
    k, v = (jnp.where(real, x, 1e4).astype(x.dtype) for x in (k, v))
    out, _ = jax.jit(partial(run, "lengths"))(q, k, v, lengths)
    assert error(out, want.out) < 1e-2


def test_only_what_maxattn_launches_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def split(inputs: PieceInputs, scale: float, tail: KeySplits) -> Any:
        asked.append("split")
        return Result(inputs.q, jnp.zeros((1, 12, 1560)))

    def plain(inputs: PieceInputs, window: Any, scale: float) -> Any:
        asked.append("whole")
        return Result(inputs.q, jnp.zeros((1, 12, 1560)))

    def listed(inputs: PieceInputs, lists: Any, scale: float, sms: int) -> Any:
        asked.append("lists")
        return Result(inputs.q, jnp.zeros((1, 12, 1560)))

    monkeypatch.setattr(split_keys_forward, "forward", split)
    monkeypatch.setattr(split_keys_lists, "forward", listed)
    monkeypatch.setattr(primitives, "fa4_forward", plain)
    monkeypatch.setattr(fa4_kernel, "knows_operands", lambda: True)
    q, k = (jax.ShapeDtypeStruct((1, t, 12, 128), "bfloat16") for t in (1560, 32760))
    full, causal, found = ma.masks.Full(), ma.masks.Causal(offset=0), []
    for launches, mask in product((True, False), (full, causal)):
        asked.clear()
        kernel, bound = Fa4(1.0, launched=launches), mask.bind(1560, 32760)
        jax.eval_shape(partial(forward, kernel, bound), q, k)
        found.append(set(asked))
    assert found == [{"split"}, {"lists"}, {"whole"}, {"whole"}]


def forward(kernel: Fa4, mask: ma.masks.Mask, q: jax.Array, k: jax.Array) -> Any:
    return kernel.forward(Inputs(q, k, k, mask=mask))[:2]


# ---- the plan ------------------------------------------------------------------------------------


def test_the_plan_says_it() -> None:
    q, k = (jax.ShapeDtypeStruct((1, t, 12, 128), "bfloat16") for t in (4680, 32760))
    asked = ma.AttentionConfig(attention="flash")
    line = "128x128 tiles; the last 4 tiles of queries in 8 splits of the keys"
    for mask in (None, ma.masks.KeyPadding(np.array([30000]))):
        assert line in ma.plan(ma.Call.of(q, k, mask), asked, target=H200).explain()
    text = ma.plan(ma.Call.of(q, k, ma.masks.Causal()), asked, target=H200).explain()
    assert (
        "of the 28,080 keys that all queries see, the last 4 tiles of queries in 5 splits" in text
    )
    two = (jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype) for x in (q, k))
    text = ma.plan(ma.Call.of(*two, ma.masks.Causal()), asked, target=H200).explain()
    assert "forward: block-sparse lists of 128x128 tiles: 8769 full, 73 mixed" in text
    text = ma.plan(ma.Call.of(q, k, ma.masks.BlockCausal(1560)), asked, target=H200).explain()
    assert "in 2 splits of the keys" in text
    text = ma.plan(ma.Call.of(q, k, ma.masks.Causal(offset=0)), asked, target=H200).explain()
    assert "splits of the keys" not in text
