"""Which tile a forward of FlashAttention-4 takes: one that fits, about the fastest measured."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from drawn_calls import DrawnCall

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.fa4 import mask_inputs
from maxattn.kernels.fa4.block_sparse_lists import visited
from maxattn.kernels.fa4.forward_tiles import (
    fits,
    forward_tile,
    forward_tiles,
    ids_persist,
    library_tile,
    persistent_pays,
    tile_over_all,
)
from maxattn.kernels.fa4.tile_sizes import Tile
from maxattn.masks.terms import SplitMask, split_mask

MEASURED = Path(__file__).parents[2] / "docs/measured/h200-forward-tiles-2026-11-25.json"
HEAD_DIMS = [8, 64, 72, 96, 104, 128, 136, 160, 168, 192, 256]
LENGTHS = [(1, 1), (64, 77), (65, 512), (4096, 333), (40_000, 40_000)]


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_tiles_fit_the_shared_memory_of_a_hopper(head_dim: int) -> None:
    """Two stages of K and V beside Q, in 227 KiB; the kernels pad head dims to 16."""
    width = -(-head_dim // 16) * 16
    for (t, s), listed in product(LENGTHS, (False, True)):
        for tile in forward_tiles(head_dim, t, s, listed):
            # From 65 to 96 P is stored beside them.
            scores = tile.queries * tile.keys if 64 < head_dim <= 96 else 0
            # Without persistent thread blocks results take the place of Q.
            persistent = persistent_pays(head_dim, 1, tile, listed)
            results = tile.queries * width if persistent else 0
            numbers = tile.queries * width + 4 * tile.keys * width + scores + results
            assert 2 * numbers + 1024 <= 227 * 1024
            assert tile.keys % 16 == 0 and tile.queries in (64, 128, 192)
            # Warps of 192 queries share the registers of an SM among three groups.
            assert tile.queries < 192 or tile.keys + width <= (192 if head_dim <= 64 else 240)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_there_is_a_tile_for_every_call(head_dim: int) -> None:
    for t, s in LENGTHS:
        tile = tile_over_all((2, t, 3, head_dim), (2, s, 3, head_dim))
        assert fits(head_dim, tile) and forward_tiles(head_dim, t, s, listed=True)
        assert tile.queries == 64 if t <= 64 else tile.queries > 64


def test_a_tile_ends_where_few_keys_end() -> None:
    """One of 144 keys would go over 144 for 77, and twice over 112 for 257 of head dim 192."""
    over = [(64, 77, 80), (96, 77, 80), (72, 333, 112), (128, 257, 96), (160, 512, 112)]
    for head_dim, s, want in over:
        tile = tile_over_all((4, 16384, 20, head_dim), (4, s, 20, head_dim))
        assert tile.keys == want, (head_dim, s, tile)
    assert tile_over_all((5, 13312, 2, 192), (5, 257, 2, 192)) == Tile(128, 80)
    assert tile_over_all((4, 4096, 8, 256), (4, 77, 8, 256)) == Tile(128, 48)


def test_long_rows_take_the_largest_tile() -> None:
    for head_dim in (64, 96, 128, 192, 256):
        shape = 2, 32768, 12, head_dim
        assert tile_over_all(shape, shape) == library_tile(head_dim)


def test_rows_of_few_heads_leave_no_processor_idle() -> None:
    """A wave of smaller tiles ends before two of larger ones."""
    rows = {n: tile_over_all((1, 1024, n, 64), (1, 512, n, 64)).queries for n in (24, 200)}
    assert rows == {24: 128, 200: 192}


def test_persistent_thread_blocks_are_for_short_rows() -> None:
    tile = Tile(128, 128)
    pays = [persistent_pays(128, n, tile) for n in (1, 16, 32)]
    assert pays == [True, True, False]
    assert persistent_pays(192, 8, Tile(128, 80)) and not persistent_pays(192, 8, Tile(128, 112))
    # Beside longer heads a test of pairs leaves too few registers.
    assert not persistent_pays(192, 8, Tile(128, 80), listed=True)
    assert ids_persist((2, 1920, 8, 64), Tile(192, 128))
    assert not ids_persist((2, 1920, 8, 72), Tile(192, 128))
    assert not ids_persist((2, 1920, 6, 64), Tile(192, 128))  # 120 rows are a single wave


def test_smaller_tiles_where_they_skip_more() -> None:
    """Blocks of 256 are two tiles of 128; the more of them are seen, the less do tiles of 192 visit
    in vain.
    """
    for block, window, want in ((256, 2, (128, 128)), (256, 16, (192, 128)), (1560, 4, (192, 128))):
        n = 12 * block
        mask = M.BlockSlidingWindow(block, window).bind(n, n)
        count = partial(visited, mask, lengths=(n, n))
        assert forward_tile((2, n, 12, 64), n, count) == want


def test_of_traced_positions_nothing_is_counted() -> None:
    mask = M.LocalWindow(50, 0).bind(4096, 4096)
    shape = 1, 4096, 40, 64
    assert mask_inputs.tile_of(mask, shape, 4096, traced=True) == library_tile(64)
    assert mask_inputs.tile_of(mask, shape, 4096) != library_tile(64)


# ---- what was measured ---------------------------------------------------------------------------


def rows() -> list[dict[str, Any]]:
    """Return the measured rows of forwards on an H200."""
    every = json.loads(MEASURED.read_text())["rows"]
    return [row for row in every if "forward" in row and "device" not in row]


def chosen(call: ma.Call) -> str:
    """Spell the tile of a call as the file does."""
    queries = call.batch, call.q_len, call.heads, -(-call.head_dim // 8) * 8
    keys, head_dim = (call.batch, call.kv_len, call.kv_heads, queries[3]), queries[3]
    split = split_mask(call.mask)
    positions = split.positions if isinstance(split, SplitMask) else M.Full()
    ids = any(term.has_data and not term.is_of_keys for term in call.mask.terms())
    if positions.is_full and not ids:
        tile = tile_over_all(queries, keys)
        persistent = persistent_pays(head_dim, -(-call.kv_len // tile.keys), tile)
    else:
        tile = mask_inputs.tile_of(positions, queries, call.kv_len, has_ids=ids)
        count = visited(positions, tile, (call.q_len, call.kv_len))
        persistent = persistent_pays(head_dim, count.tiles / count.rows, tile, listed=True)
        persistent = ids_persist(queries, tile) if ids else persistent
    return f"{tile.queries}x{tile.keys}{' persistent' * persistent}"


def test_the_tile_is_about_the_fastest_that_was_measured() -> None:
    over = {}
    for row in rows():
        call, times = DrawnCall.of_json(row["call"]), row["forward"]
        name = chosen(call.call())
        own = [ms for x, ms in times.items() if x not in ("before", "library")]
        if name in times and len(own) > 1:
            over[str(call)] = times[name] / min(own)
    assert len(over) > 0.8 * len(rows())
    worst = sorted(over.items(), key=lambda x: -x[1])[:5]
    assert fmean(over.values()) < 1.012 and np.quantile([*over.values()], 0.95) < 1.06, worst
    assert worst[0][1] < 1.1, worst
