"""The launch order of rows of tiles: each is started once, light ones last, and SMs idle less."""

from __future__ import annotations

import heapq
from itertools import pairwise

import jax.numpy as jnp
import numpy as np
import pytest

from maxattn import masks as M
from maxattn.devices import SMS
from maxattn.kernels.base import Inputs
from maxattn.kernels.fa4 import mask_inputs, row_orders
from maxattn.kernels.fa4.block_sparse import spec_of
from maxattn.kernels.fa4.block_sparse_lists import TilingSpec, tiling
from maxattn.kernels.fa4.block_sparse_rows import FORWARD_CLASSES, heaviest_first
from maxattn.kernels.fa4.launch_order import Order, at_wave, order_of
from maxattn.kernels.fa4.tile_sizes import Tile

ORDERS = [Order(), Order(True)]
ORDERS += [Order(False, 3, 2), Order(True, 3, 2), Order(True, 9, 4), Order(False, 1, 6)]
ORDERS += [Order(True, 4)]
MANY = 1 << 20  # lanes, more than any call's


def started(order: Order, rows: int, lanes: int) -> list[tuple[int, int]]:
    """List (row, lane) as they are started."""
    at = np.arange(rows * lanes)
    row, lane = order.place(at % rows, at // rows, rows, lanes, np)
    return list(zip(row.tolist(), lane.tolist(), strict=True))


def groups(lanes: int, group: int) -> list[range]:
    """List the lanes of each group: fewer than half a group go with the one before."""
    starts = [n for n in range(0, lanes, group) if n == 0 or 2 * (lanes - n) >= group]
    return [range(a, b) for a, b in pairwise([*starts, lanes])]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("rows", "lanes"), [(10, 6), (11, 7), (64, 24)])
def test_every_row_is_started_once(order: Order, rows: int, lanes: int) -> None:
    got = started(order, rows, lanes)
    assert sorted(got) == [(r, h) for r in range(rows) for h in range(lanes)]
    heads = order.heads or lanes
    ends = got[len(got) - order.light * heads :]
    light = range(order.light) if order.backwards else range(rows - order.light, rows)
    assert {r for r, _ in ends} == set(light)
    assert {h for _, h in ends} == (set(range(lanes - heads, lanes)) if order.light else set())
    early = [h for _, h in got[: rows * (lanes - heads)]]
    assert early == sorted(early)  # head by head


def test_all_heads_of_a_row_follow_each_other() -> None:
    assert started(Order(group=MANY), 3, 2) == [(r, h) for r in range(3) for h in range(2)]
    assert started(Order(True, group=MANY), 2, 2) == [(1, 0), (1, 1), (0, 0), (0, 1)]


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(("rows", "lanes"), [(3, 8), (11, 7), (5, 3), (1, 9), (4, 17), (2, 24)])
@pytest.mark.parametrize("group", [1, 2, 4, 16])
def test_groups_of_heads_follow_each_other(
    rows: int, lanes: int, group: int, backwards: bool
) -> None:
    got = started(Order(backwards, persistent=True, group=group), rows, lanes)
    in_turn = range(rows)[::-1] if backwards else range(rows)
    assert got == [(r, h) for lane in groups(lanes, group) for r in in_turn for h in lane]


def test_heads_whose_keys_a_gpu_caches_are_a_group() -> None:
    """Rows of 204 heads would each find the keys of the last one gone from a cache of 50 MB."""

    def grouped(mask: M.Mask, batch: int, length: int, heads: int, kv_heads: int = 0) -> int:
        queries, tile = (batch, length, heads, 128), Tile(128, 128)
        keys = (batch, length, kv_heads or heads, 128)
        lists = tiling(TilingSpec(mask.bind(length, length), tile, tile, (length, length)), (0, 0))
        return row_orders.of(queries, keys, lists.forward, tile, forward=True).group

    assert grouped(M.Causal(), 102, 1286, 2) == 32  # 11 tiles of keys and values: 0.72 MB a head
    assert grouped(M.Causal(), 102, 1286, 8, 2) == 128  # four of which read the same
    assert grouped(M.LocalWindow(300, 0), 102, 1286, 2) == 64  # of 4 tiles at most
    assert grouped(M.Causal(), 1, 600, 24) == 32  # all of them
    assert grouped(M.Causal(), 102, 8192, 2) == 0  # of long rows each head's come one by one


def test_heads_whose_keys_are_all_cached_are_one_group() -> None:
    """Of two groups the last rows would leave SMs idle for nothing."""

    def lanes(heads: int) -> int:
        return row_orders.cached_lanes(2048, (1, 2048, heads, 128), (1, 2048, heads, 128))

    assert lanes(36) == lanes(48) == 64  # each reads 1 MB
    assert lanes(49) == lanes(132) == 16


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("segments", [(600, 300, 500), (9000, 600, 500)])
def test_listed_rows_have_groups_where_thread_blocks_are_persistent(
    segments: tuple[int, ...], own_rows: bool
) -> None:
    """A short row of 600 tokens reads 6 tiles of 128; where rows are long none is persistent.

    Rows that ids leave are not known to be short, and those of 3, 5 and 6 tiles are uneven: each is
    taken as soon as a thread block is free.
    """
    length, ids = sum(segments), np.repeat(np.arange(3, dtype=np.int32), segments)[None]
    mask = M.Segments.of_lengths(segments)
    if own_rows:
        ids = np.concatenate([ids, ids[:, ::-1]])
        mask = M.Segments(ids, ids)
    x = jnp.zeros((2, length, 80, 128), jnp.bfloat16)
    bound = mask.bind(length, length)
    pairs = mask_inputs.listed(Inputs(x, x, x, mask=bound)).pairs
    assert pairs is not None and pairs.tiles is not None
    made = spec_of(x, x, pairs.tiles.forward(pairs, 1.0), forward=True).order
    assert made.listed and made.own_rows is own_rows
    assert made.group == (32 if made.persistent and not own_rows else 0)
    assert made.persistent is (own_rows or segments[0] < 9000)
    assert made.dynamic is made.persistent


def test_places_past_the_last_one_divide_nothing_by_0() -> None:
    """Persistent thread blocks ask for them."""
    order, past = Order(persistent=True, group=4), np.arange(24, 200)
    with np.errstate(all="raise"):
        row, _ = order.place(past % 3, past // 3, 3, 8, np)
    assert (row >= 3).all()


def test_persistent_thread_blocks_take_short_rows_of_a_mask_row_by_row() -> None:
    """Rows of long segments have a thread block each, and calls without a mask no lists."""
    shape, tile = (1, 32_768, 12, 128), Tile(128, 128)

    def chosen(segments: int) -> Order:
        mask = M.Segments.of_lengths((shape[1] // segments,) * segments).bind(shape[1], shape[1])
        lists = tiling(TilingSpec(mask, tile, (64, 128), (shape[1], shape[1])), (0, 0))
        return row_orders.of(shape, shape, lists.forward, tile, forward=True)

    assert chosen(32) == Order(persistent=True, group=16)
    assert not chosen(8).persistent and not chosen(8).group
    assert not row_orders.of((1, 1024, 64, 128), (1, 1024, 64, 128), None, tile, forward=True).group


def test_light_rows_of_several_heads_end_with_the_lightest() -> None:
    got = started(Order(True, 2, 3), 5, 4)
    assert got[5:14] == [(r, h) for h in (1, 2, 3) for r in (4, 3, 2)]
    assert got[14:] == [(r, h) for r in (1, 0) for h in (1, 2, 3)]


@pytest.mark.parametrize(
    ("work", "lanes", "want"),
    [
        ([7, 7, 7, 7], 8, Order()),
        ([1, 2, 3, 4], 8, Order(True, 2, 8)),
        ([4, 3, 2, 1], 200, Order(False, 2, 66)),
        ([3, 7, 7, 7, 7, 7, 7, 7], 3, Order(True, 1, 3)),
        ([7] * 200 + [1] * 200, 12, Order(False, 200, 1)),
        ([7] * 300 + [1] * 200, 12, Order(False, 200, 1)),
        ([0, 0, 0], 4, Order()),
        ([5], 4, Order()),
    ],
)
def test_orders(work: list[int], lanes: int, want: Order) -> None:
    assert order_of(np.array(work), lanes) == want


def test_what_is_known_on_the_device_alone_keeps_its_order() -> None:
    assert order_of(jnp.arange(5), 4) == Order()


def busy(work: np.ndarray, order: Order, lanes: int) -> float:
    """Return the share of the SMs' time that is used, where each takes the next row when free."""
    free = [0.0] * SMS
    for row, _ in started(order, len(work), lanes):
        heapq.heapreplace(free, free[0] + float(work[row]))
    return float(work.sum()) * lanes / SMS / max(free)


@pytest.mark.parametrize(("block", "window", "length"), [(1560, 7, 32_760), (256, 16, 32_768)])
def test_the_chip_idles_less_under_a_block_window(block: int, window: int, length: int) -> None:
    mask = M.BlockSlidingWindow(block, window).bind(length, length)
    spec = TilingSpec(mask, (128, 128), (64, 128), (length, length))
    for lists in tiling(spec, (0, 0)):
        work = lists.work + 3  # the cost of a start and an end, in tiles
        order = order_of(lists.work, 12)
        assert order.light
        assert busy(work, order, 12) > 0.985
        assert busy(work, order, 12) > busy(work, order._replace(light=0), 12) + 0.005


# ---- persistent thread blocks --------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 5, 78, 114, 132])
@pytest.mark.parametrize("total", [1, 4, 77, 132, 133, 1000])
def test_persistent_blocks_take_every_place_once(blocks: int, total: int) -> None:
    blocks = min(blocks, total)  # as the launch has it
    waves = -(-total // blocks)
    took = [at_wave(wave, block, blocks, np) for block in range(blocks) for wave in range(waves)]
    assert sorted(int(at) for at in took if at < total) == list(range(total))
    # A block stops at its first place past the end: none may have work after it.
    for block in range(blocks):
        places = [int(at_wave(wave, block, blocks, np)) for wave in range(waves + 1)]
        past = [at >= total for at in places]
        assert past == sorted(past)


def test_every_other_wave_goes_backwards() -> None:
    assert [at_wave(wave, np.arange(3), 3, np).tolist() for wave in (0, 1, 2)] == [
        [0, 1, 2],
        [5, 4, 3],
        [6, 7, 8],
    ]


@pytest.mark.parametrize(
    ("work", "lanes", "persistent"),
    [
        ([32] * 22, 160, True),  # SDXL 64²: even rows, many of them
        ([1] * 22, 160, True),  # its cross-attention
        ([10] * 140, 1, True),  # two waves either way
        ([90] + [2] * 131, 1, True),  # one wave
        ([*range(90, 0, -1)], 4, False),  # waves end far apart
    ],
)
def test_blocks_are_persistent_where_waves_end_together(
    work: list[int], lanes: int, persistent: bool
) -> None:
    assert order_of(np.array(work), lanes, may_persist=True).persistent is persistent
    assert not order_of(np.array(work), lanes).persistent


@pytest.mark.parametrize(
    ("work", "lanes", "dynamic"),
    [
        ([2, 4, 6, 8], 624, True),  # causal, 500 queries
        ([*range(1, 9)], 128, True),
        ([1, 2, 3, 4], 1984, False),  # so short that a wait for the next row would count
        ([8] * 8, 128, False),
    ],
)
def test_uneven_rows_are_taken_when_a_thread_block_is_free(
    work: list[int], lanes: int, dynamic: bool
) -> None:
    made = order_of(np.array(work), lanes, may_persist=True, group=64)
    assert made.persistent and made.group == 64 and made.dynamic is dynamic
    # Of long rows a thread block each ends as soon.
    assert not order_of(np.array(work), lanes, may_persist=True).dynamic


@pytest.mark.parametrize("lengths", [(600, 300, 500), (512, 512, 512)])
def test_named_rows_are_taken_where_they_are_uneven(lengths: tuple[int, ...]) -> None:
    tile, length = Tile(128, 128), sum(lengths)
    mask = M.Segments.of_lengths(lengths).bind(length, length)
    lists = tiling(TilingSpec(mask, tile, tile, (length, length)), (0, 0)).forward
    work, rows = np.asarray(lists.work), np.asarray(heaviest_first(lists, FORWARD_CLASSES))
    shape = 4, length, 40, 128
    made = row_orders.of_named(work, rows, shape, shape, tile)
    assert made.listed and made.persistent and made.dynamic is (len(set(lengths)) > 1)
    assert not row_orders.of_named(work, rows, (4, length, 40, 192), shape, tile).persistent


def test_an_order_for_all_heads_is_the_same_for_any_number_of_them() -> None:
    """It is part of what a kernel is compiled for."""
    assert len({order_of(np.full(22, 32), lanes, may_persist=True) for lanes in (10, 20, 160)}) == 1
