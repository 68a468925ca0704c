"""What FlashAttention-4 is handed for masks with arrays: the pairs that its lists and its test
allow together, in which order rows start, and how calls under `vmap` become one.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels import DotProduct
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.fa4 import key_lengths, mask_inputs
from maxattn.kernels.fa4.block_sparse import TilePass, padded
from maxattn.kernels.fa4.block_sparse_lists import TileLists
from maxattn.kernels.fa4.block_sparse_rows import (
    BACKWARD_CLASSES,
    FORWARD_CLASSES,
    RowClasses,
    heaviest_first,
)
from maxattn.kernels.fa4.fold_rows import with_rows_folded
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fa4.launch_order import Order
from maxattn.kernels.fa4.list_limits import MOST_ROW_TILES
from maxattn.kernels.fa4.tile_sizes import Tile
from tests.waiting import but

BATCH, T, S = 3, 300, 401
RNG = np.random.default_rng(4)
H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))
CONFIG = ma.AttentionConfig(attention="flash")


def ids_of(length: int, *rows: tuple[int, ...]) -> np.ndarray:
    found = [np.repeat(np.arange(len(row)), row) for row in rows]
    assert all(len(row) == length for row in found)
    return np.stack(found).astype(np.int32)


SORTED = M.Segments(
    ids_of(T, (128, 100, 72), (300,), (0, 5, 295)), ids_of(S, (256, 0, 145), (401,), (9, 300, 92))
)
LENGTHS = M.KeyPadding(np.array([401, 130, 0]))
FLAGS = M.KeyPadding(RNG.random((BATCH, S)) < np.array([[0.9], [0.1], [0.0]]))
MASKS = {
    "sorted": SORTED,
    "unsorted": M.Segments(RNG.integers(-1, 3, (BATCH, T)), RNG.integers(-1, 3, (BATCH, S))),
    "shared": M.Segments(ids_of(T, (40, 260)), ids_of(S, (300, 101))),
    "no key": M.Segments(np.zeros((BATCH, T), int), np.ones((BATCH, S), int)),
    "causal & segments": M.Causal() & SORTED,
    "causal & lengths": M.Causal() & LENGTHS,
    "window & flags": M.LocalWindow(60, 30) & FLAGS,
    "segments & flags": SORTED & FLAGS,
    "frames & segments & lengths": M.BlockSlidingWindow(50, 3) & SORTED & LENGTHS,
}


def table_of(mask: M.Mask, offsets: tuple[int, int] = (0, 0)) -> np.ndarray:
    found = mask.bind(T, S).allowed(np.arange(T), np.arange(S), *offsets)
    return np.broadcast_to(np.asarray(found)[:, 0], (BATCH, T, S))


def inputs_of(mask: M.Mask, offsets: tuple[Any, Any] = (0, 0), head_dim: int = 128) -> Inputs:
    q, k = jnp.zeros((BATCH, T, 2, head_dim)), jnp.zeros((BATCH, S, 2, head_dim))
    return Inputs(q, k, k, None, mask.bind(T, S), *offsets)


def allowed_by(given: TilePass, by_keys: bool, batch: int = BATCH) -> np.ndarray:
    """Go through lists as a kernel does: [splits * B] tables of pairs."""
    assert given.lists is not None and given.test is not None
    lists = [np.asarray(x) for x in given.lists]
    count = lists[0].shape[0] if lists[0].ndim == 2 else batch
    rows, tile = lists[0].shape[-1], given.tile
    shapes = (count, rows), (count, rows, lists[1].shape[-1])
    lists = [np.broadcast_to(x, shapes[i % 2]) for i, x in enumerate(lists)]
    arrays = tuple(np.asarray(x) for x in padded(given))
    found = np.zeros((count, T + 256, S + 256), int)
    for b, row in np.ndindex(count, rows):
        for which in (0, 2):
            for column in lists[which + 1][b, row, : lists[which][b, row]]:
                at = (column, row) if by_keys else (row, column)
                q, kv = (i * n + np.arange(n) for i, n in zip(at, tile, strict=True))
                passed = which == 2 or given.test(b % batch, q[:, None], kv[None], arrays, np)
                found[b][np.ix_(q, kv)] += passed
                # What is tested ends with the keys, for queries past the last one too.
                assert which == 2 or not found[b][q][:, S:].any()
    assert found.max(initial=0) <= 1  # no tile is in a list twice, or in both
    return found[:, :T, :S] > 0


def unpacked(packed: Any) -> TileLists:
    """Read the one array that holds lists."""
    parts = ((x[..., 0], x[..., 1:]) for x in np.asarray(packed))
    return TileLists(*(y for part in parts for y in part))


def with_offsets() -> list[Any]:
    """Let masks of one kind meet offsets once."""
    few = ("sorted", "causal & segments", "frames & segments & lengths")
    moved = [
        pytest.param(name, (70, 30), marks=[] if name in few else pytest.mark.slow)
        for name in MASKS
    ]
    return [*((name, (0, 0)) for name in MASKS), *moved]


@pytest.mark.parametrize(("name", "offsets"), with_offsets())
def test_lists_and_test_allow_what_the_mask_does(name: str, offsets: tuple[int, int]) -> None:
    """With offsets, as in a hop of a ring: they are traced, and ids are those of the shards.

    The kernel gets the lists as one array.
    """

    @jax.jit
    def passes(mask: M.Mask, q_offset: Any, kv_offset: Any) -> Any:
        at = (q_offset, kv_offset) if any(offsets) else (0, 0)
        pairs = mask_inputs.listed(inputs_of(mask, at)).pairs
        assert pairs is not None
        made.append((pairs.tiles.forward(pairs, 1.0), pairs.tiles.backward(pairs, 1.0)))
        return [(x.lists.packed(), x.arrays, x.rows) for x in made[-1]]

    made: list[Any] = []
    found = passes(MASKS[name], *offsets)
    want = table_of(MASKS[name], offsets)
    for by_keys, (packed, arrays, rows) in enumerate(found):
        lists = unpacked(packed)
        given = made[-1][by_keys]._replace(lists=lists, arrays=arrays)
        assert (allowed_by(given, bool(by_keys)) == want).all()
        work = np.asarray(lists.work).reshape(-1)
        assert sorted(np.asarray(rows)[0].tolist()) == list(range(len(work)))
        classes = BACKWARD_CLASSES if by_keys else FORWARD_CLASSES
        flat = TileLists(*(np.asarray(x).reshape(-1, *x.shape[lists.work.ndim :]) for x in lists))
        assert (np.asarray(heaviest_first(flat, classes)) == rows).all()


@pytest.mark.parametrize("splits", [1, 2, 3, 5])
@pytest.mark.parametrize("limits", [(401, 130, 0), (128, 256, 1)])
def test_splits_share_out_what_lengths_allow(splits: int, limits: tuple[int, ...]) -> None:
    tile, ends = Tile(64, 128), jnp.asarray(limits, jnp.int32)
    lists = key_lengths.lists_by_keys(ends, tile, (T, S), splits)
    if splits > 1:
        assert lists.mixed.shape == (splits * BATCH, 4, -(-5 // splits))
    assert lists.is_traced
    lists = unpacked(lists.packed())
    given = TilePass(tile, 1.0, lists, key_lengths.TEST, (ends,), splits=splits)
    found = allowed_by(given, by_keys=True).reshape(splits, BATCH, T, S)
    want = np.arange(S) < np.array(limits)[:, None, None]
    assert (found.sum(axis=0) == np.broadcast_to(want, (BATCH, T, S))).all()


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("short", but([0, 16, 512], [0, 16]))
@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("most", but([1, 9, 300], [1, 300]))
def test_every_row_starts_once_and_long_ones_first(
    own_rows: bool, short: int, parts: int, most: int
) -> None:
    """Rows of a class, of up to twice as many tiles, head by head; short ones row by row."""
    rows, heads, batch = 19, 3, 2
    work = RNG.integers(0, most, (batch, rows) if own_rows else rows)
    classes, tiles = RowClasses(parts, short), np.zeros((*work.shape, most // 2 + 1), np.int32)
    named = heaviest_first(TileLists(work, tiles, 0 * work, tiles), classes)
    traced = TileLists(*map(jnp.asarray, (work, tiles, 0 * work, tiles)))
    on_device = jax.jit(lambda: heaviest_first(traced, classes))()
    assert (np.asarray(on_device) == named).all()
    order, sizes = Order(listed=True, own_rows=own_rows), (rows, heads, batch)
    row, head, b = order.named(np.arange(rows * heads * batch), named, sizes, np)
    at = [*zip(b.tolist(), head.tolist(), row.tolist(), strict=True)]
    assert len({*at}) == len(at) and head.max() == heads - 1 and b.max() == batch - 1
    each = work[b, row] if own_rows else work[row]
    power = np.where(each > 0, 2.0 ** np.floor(np.log2(np.maximum(each, 1))), 0.5)
    each = power + np.floor(np.maximum(each / power - 1, 0) * parts) * power / parts
    assert (np.diff(each) <= 0).all()
    for tiles in np.unique(each):
        of_class = [at[i] for i in np.flatnonzero(each == tiles)]
        entry = [(x[0], x[2]) if own_rows else (x[2],) for x in of_class]
        lane = [(x[1],) if own_rows else x[:2] for x in of_class]
        across = tiles < short
        turns = zip(entry, lane, strict=True) if across else zip(lane, entry, strict=True)
        assert sorted(turns) == [*(zip(entry, lane) if across else zip(lane, entry))]  # noqa: B905


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)])
def test_vmap_is_one_call_where_each_example_has_ids(axes: tuple[Any, Any]) -> None:
    """Of plain attention, in which batch rows are as far apart."""
    batches, kernel, many = [], DotProduct(1.0), 4

    def compute(inputs: Inputs) -> Any:
        batches.append(inputs.q.shape[0])
        return kernel.forward(inputs)

    def one(x: Any, ids: Any) -> Any:
        mask = M.Segments(ids, ids).bind(T, T)
        return with_rows_folded(compute, Inputs(x, x, x, None, mask))

    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(many, 1, T, 2, 8)), "float32")
    ids = jnp.asarray(rng.integers(0, 3, (many, 1, T)))
    given = [y if a == 0 else y[0] for y, a in zip((x, ids), axes, strict=True)]
    got = jax.vmap(one, axes)(*given)
    assert batches[-1] == many
    for i in range(many):
        want = one(*(y[i] if a == 0 else y for y, a in zip(given, axes, strict=True)))
        np.testing.assert_allclose(got.out[i], want.out, atol=1e-5)
        np.testing.assert_allclose(got.lse[i], want.lse, atol=1e-5)


def test_vmap_of_ids_that_batch_rows_share() -> None:
    kernel, rng = DotProduct(1.0), np.random.default_rng(0)

    def one(x: Any, ids: Any) -> Any:
        mask = M.Segments(ids, ids).bind(20, 20)
        stats = jnp.full((2, 2, 20), 20.0)
        back = lambda inputs, rows: kernel.backward(inputs, rows)._replace(dbias=None)  # noqa: E731
        return with_rows_folded(back, Inputs(x, x, x, None, mask), Rows(x, stats, x, stats))

    x = jnp.asarray(rng.normal(size=(3, 2, 20, 2, 8)), "float32")
    ids = jnp.asarray(rng.integers(0, 3, (3, 1, 20)))
    got = jax.jit(jax.vmap(one))(x, ids)
    for i in range(3):
        np.testing.assert_allclose(got.dk[i], one(x[i], ids[i]).dk, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("mask", "lists"),
    [
        (M.Segments(np.zeros((1, 512), int), np.zeros((1, 512), int)), True),
        (M.Causal() & M.KeyPadding(np.array([100])), True),
        (M.LocalWindow(9, 9) & M.KeyPadding(np.ones((1, 512), bool)), True),
        (M.KeyPadding(np.array([100])), False),
        (M.KeyPadding(np.ones((1, 512), bool)), False),
        (M.Causal(), False),
    ],
)
def test_which_masks_get_lists_on_hopper_gpus(mask: M.Mask, lists: bool) -> None:
    call = ma.Call(1, 512, 512, 2, 2, 64, "bfloat16", mask=mask.bind(512, 512))
    assert Fa4.build(call, CONFIG, H200).lists is lists
    a100 = ma.Target("gpu", "NVIDIA A100", (("fa4-jax", "0.1.0"),))
    assert not Fa4.build(call, CONFIG, a100).lists


def test_lists_of_many_rows_are_bounded_and_the_plan_says_so() -> None:
    length = 2**17
    for batch, fits in ((1, True), (64, False)):
        ids = jax.ShapeDtypeStruct((batch, length), "int32")
        mask = jax.eval_shape(lambda x: M.Segments(x, x), ids)
        call = ma.Call(batch, length, length, 2, 2, 128, "bfloat16", mask=mask)
        kernel = Fa4.build(call, CONFIG, H200)
        assert kernel.lists is fits
        notes = " ".join(kernel.notes(call, CONFIG, H200))
        assert (str(MOST_ROW_TILES) in notes) is not fits
        assert ("jnp.argsort(ids, axis=1)" in notes) is fits


def test_the_backward_of_short_lengths_is_split() -> None:
    assert key_lengths.splits_for((2, 32760, 12, 128), (2, 512, 12, 128), 132) > 1
    assert key_lengths.splits_for((2, 32760, 12, 128), (2, 32760, 12, 128), 132) == 1
    assert key_lengths.splits_for((2, 32760, 12, 128), (2, 512, 4, 128), 132) > 1  # shared heads
    call = ma.Call(2, 32760, 512, 12, 12, 128, "bfloat16", mask=M.KeyPadding(np.array([60, 512])))
    assert Fa4.splits_backward(call, H200)


@pytest.mark.parametrize("group", [1, 4, 32])
def test_groups_of_heads_go_through_all_listed_rows(group: int) -> None:
    """Nine lanes: of groups of 4 the ninth goes with the second."""
    rows, heads, batch = 7, 3, 3
    work = RNG.integers(1, 9, rows)
    tiles = np.zeros((rows, 9), np.int32)
    named = heaviest_first(TileLists(work, tiles, 0 * work, tiles), FORWARD_CLASSES)
    order = Order(persistent=True, listed=True, group=group)
    at = np.arange(rows * heads * batch)
    row, head, b = order.named(at, named, (rows, heads, batch), np)
    lanes = {1: [[n] for n in range(9)], 4: [range(4), range(4, 9)], 32: [range(9)]}[group]
    want = [(r, x) for each in lanes for r in named[0] for x in each]
    assert [*zip(row.tolist(), (b * heads + head).tolist(), strict=True)] == want
