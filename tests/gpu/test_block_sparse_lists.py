"""Block-sparse lists against the dense mask, and the test of pairs that mixed tiles get."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn import masks as M
from maxattn.devices import device_of
from maxattn.kernels.base import Inputs
from maxattn.kernels.fa4 import mask_inputs, tile_sizes
from maxattn.kernels.fa4.block_sparse_lists import TileLists, TilingSpec, tally, tiling
from tests.cases import LENGTHS, MASKS

POSITIONS = ["window", "block window", "block causal", "video", "window | sink", "rows empty"]
TILES = (16, 12), (10, 24)
FRAMES = {
    "1560x7": (M.BlockSlidingWindow(156, 7), 3276, 3276),
    "256x16": (M.BlockSlidingWindow(256, 3), 1500, 1500),
    "later queries": (M.BlockSlidingWindow(156, 3), 700, 1500),
    "sink, first alone": (
        M.VideoMask(9, 130, 2, window=2, sink=2, first_frame_alone=True),
        1170,
        1170,
    ),
    "no window": (M.VideoMask(9, 130, 3), 1170, 1170),
}


def visited(lists: TileLists) -> list[tuple[list[int], list[int]]]:
    """Return the (mixed, full) tiles of each row."""
    counts, x = (np.asarray(lists.mixed_count), np.asarray(lists.full_count)), lists
    each = zip(counts[0], np.asarray(x.mixed), counts[1], np.asarray(x.full), strict=True)
    return [(mixed[:m].tolist(), full[:f].tolist()) for m, mixed, f, full in each]


def check(
    lists: TileLists, ok: np.ndarray, tile: tuple[int, ...], exact: bool, past: bool = False
) -> None:
    """Hold the lists of `ok` [rows, columns] against it, tile by tile; `past`: a row past the end
    is tested.
    """
    for i, (mixed, full) in enumerate(visited(lists)):
        rows = ok[i * tile[0] : (i + 1) * tile[0]]
        parts = [rows[:, j : j + tile[1]] for j in range(0, ok.shape[1], tile[1])]
        assert mixed == sorted(mixed) and full == sorted(full) and not set(mixed) & set(full)
        assert all(parts[j].all() for j in full)
        some = {j for j, part in enumerate(parts) if part.any()}
        assert some <= {*mixed, *full}
        tested = past and len(rows) < tile[0]
        assert not (tested and full)
        if exact:
            assert some == {*mixed, *full} and (tested or not any(parts[j].all() for j in mixed))


@cache
def traced_tiling(spec: TilingSpec) -> Any:
    """Make the program of lists, which is the same for all offsets."""
    return jax.jit(partial(tiling, spec))


def check_both(
    mask: M.Mask, t: int, s: int, traced: bool, offsets: tuple[int, int] = (0, 0)
) -> None:
    ok = np.asarray(mask.allowed(np.arange(t), np.arange(s), *offsets))[0, 0]
    spec = TilingSpec(mask, *TILES, (t, s))
    made = traced_tiling(spec) if traced else partial(tiling, spec)
    lists = made(tuple(map(jnp.int32, offsets)) if traced else offsets)
    exact = not traced and offsets == (0, 0)
    check(lists.forward, ok, TILES[0], exact)
    check(lists.backward, ok.T, TILES[1][::-1], exact, past=True)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("length", ["64", "odd", "cross", "one", "short"])
@pytest.mark.parametrize("name", POSITIONS)
def test_lists_of_small_masks(name: str, length: str, traced: bool) -> None:
    t, s = LENGTHS[length]
    mask = MASKS[name](1, 1, t, s)
    assert mask is not None
    mask = mask.bind(t, s)
    part = t // 2 + 1, s // 2 + 1
    check_both(mask, *(part if traced else (t, s)), traced)
    check_both(mask, *part, traced, (t // 2 - 1, s // 3))


@pytest.mark.parametrize("name", FRAMES)
def test_lists_of_frames(name: str) -> None:
    mask, t, s = FRAMES[name]
    mask = mask.bind(t, s)
    check_both(mask, t, s, traced=False)
    count = tally(mask, TILES[0], (t, s))
    lists = tiling(TilingSpec(mask, *TILES, (t, s)), (0, 0))
    assert (count.full, count.mixed) == (
        lists.forward.full_count.sum(),
        lists.forward.mixed_count.sum(),
    )
    assert sum(count) == -(-t // TILES[0][0]) * -(-s // TILES[0][1])


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("name", [*POSITIONS, "causal & lengths", "segments & window"])
def test_pairs_pass_as_the_mask_says(name: str, traced: bool) -> None:
    t, s = LENGTHS["cross"]
    plain = MASKS[name.removesuffix(" & window")](3, 2, t, s)
    assert plain is not None
    mask = (plain & M.BlockSlidingWindow(9, 4) if name.endswith(" & window") else plain).bind(
        t, s, 3, 2
    )
    q, k, offset = jnp.zeros((3, t, 2, 8)), jnp.zeros((3, s, 2, 8)), jnp.int32(0) if traced else 0
    pairs = mask_inputs.listed(Inputs(q, k, k, mask=mask, q_offset=offset)).pairs
    assert pairs is not None
    arrays = tuple(np.asarray(x) for x in mask_inputs.arrays(pairs))
    at = np.arange(3)[:, None, None], np.arange(t)[None, :, None], np.arange(s)[None, None]
    want = np.broadcast_to(np.asarray(mask.allowed(np.arange(t), np.arange(s)))[:, 0], (3, t, s))
    assert (np.broadcast_to(pairs.tiles.test(*at, arrays, np), want.shape) == want).all()
    assert mask_inputs.all_see(pairs) <= want.any(-1).all()
    hash(pairs.tiles.test)


@pytest.mark.parametrize("traced", [False, True])
def test_pairs_of_a_part_pass_as_the_mask_says(traced: bool) -> None:
    """As in a ring: positions of the first query and key that are not 0."""
    mask, (t, s), starts = M.BlockSlidingWindow(9, 2).bind(60, 60), (25, 30), (20, 10)
    q, k = jnp.zeros((1, t, 2, 8)), jnp.zeros((1, s, 2, 8))
    offsets = map(jnp.int32, starts) if traced else starts
    pairs = mask_inputs.listed(Inputs(q, k, k, None, mask, *offsets)).pairs
    assert pairs is not None
    arrays = tuple(np.asarray(x) for x in mask_inputs.arrays(pairs))
    got = pairs.tiles.test(0, np.arange(t)[:, None], np.arange(s)[None], arrays, np)
    want = np.asarray(mask.allowed(np.arange(t), np.arange(s), *starts))[0, 0]
    assert want.any() and not want.all() and (got == want).all()


def test_lists_are_for_hopper_and_a_known_library() -> None:
    def takes(version: str, kind: str) -> bool:
        return tile_sizes.takes_lists(version, device_of(kind))

    assert takes("0.1.0", "NVIDIA H200") and takes("0.1.3", "NVIDIA H100 80GB HBM3")
    assert not takes("0.2.0", "NVIDIA H200") and not takes("0.1.0", "NVIDIA B200")
