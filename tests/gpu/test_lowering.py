"""Masks as FlashAttention-4 and tokamax take them: bands, intervals, ids allow the same pairs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels.base import Inputs
from maxattn.kernels.fa4 import mask_inputs, windows
from maxattn.kernels.fused import tokamax_mosaic
from maxattn.masks import Band
from maxattn.masks.band_pieces import Piece, pieces
from maxattn.masks.terms import SplitMask, sort_terms, split_mask
from tests.cases import LENGTHS, MASKS, allowed

PAIRS = [name for name in MASKS if name not in ("full", "dense", "dense heads", "not segments")]
LONGEST = max(s for _, s in LENGTHS.values())
INTERVALS = ["causal", "window", "block window", "block causal", "causal & lengths", "rows empty"]


def inputs_of(name: str, length: str) -> Inputs:
    t, s = LENGTHS[length]
    q, k = jnp.zeros((3, t, 2, 8)), jnp.zeros((3, s, 2, 8))
    mask = MASKS[name](3, 2, t, s)
    assert mask is not None
    return Inputs(q, k, k, mask=mask.bind(t, s, 3, 2))


def wanted(inputs: Inputs) -> np.ndarray:
    t, s = inputs.q.shape[1], inputs.k.shape[1]
    ok = allowed(inputs.mask, t, s)
    assert ok is not None
    return np.broadcast_to(ok[:, 0], (3, t, s))


def inside(pairs: Any) -> Any:
    """Tell which keys [M, T, S] are in each interval of each query."""
    key = np.arange(LONGEST)
    lo, hi = (np.asarray(end)[..., None] for end in (pairs.lo, pairs.hi))
    return np.logical_and(key >= lo, key < hi)


def in_band(left: int | None, right: int | None, t: int, s: int, move: int = 0) -> np.ndarray:
    apart = np.arange(s)[None] - np.arange(t)[:, None] - move
    ok = np.ones((t, s), bool) if left is None else apart >= -left
    return ok if right is None else ok & (apart <= right)


@pytest.mark.parametrize("length", ["64", "odd", "cross"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_allow_what_the_mask_allows(name: str, length: str) -> None:
    inputs = inputs_of(name, length)
    if not isinstance(split_mask(inputs.mask), SplitMask):
        pytest.skip("not for FlashAttention-4")
    given, want = mask_inputs.pairs_of(inputs), wanted(inputs)
    piece, found, (t, s) = given.piece, given.pairs, want.shape[1:]
    assert found is not None
    ok = in_band(piece.left, piece.right, t, s)[None]
    if found.lo is not None:
        ok = ok & inside(found)[..., :s].any(0)[None]
    if found.q_ids is not None:
        ok = ok & (np.asarray(found.q_ids)[:, :, None] == np.asarray(found.kv_ids)[:, None])
    assert (np.broadcast_to(ok, want.shape) == want).all()


@pytest.mark.parametrize("length", ["64", "odd", "cross"])
@pytest.mark.parametrize("name", INTERVALS)
def test_tokamax_gets_each_querys_interval(name: str, length: str) -> None:
    inputs = inputs_of(name, length)
    positions = tokamax_mosaic._positions(sort_terms(inputs.mask))
    if len(positions.intervals(np.zeros(1, np.int32))) > 1:
        pytest.skip("several intervals")
    want = wanted(inputs)
    ok = inside(tokamax_mosaic._intervals(inputs).pairs)[..., : want.shape[2]]
    assert (np.broadcast_to(ok, want.shape) == want).all()


@pytest.mark.parametrize("band", [(None, 0), (4, 0), (3, 5), (2, None)])
@pytest.mark.parametrize("lengths", [(6, 6), (4, 12), (9, 6)])
def test_a_band_as_flash_attention_counts_it(band: tuple, lengths: tuple[int, int]) -> None:
    t, s = lengths
    for shift in range(-t - 6, s + 6):
        for piece in pieces(Band(*band), shift, t, s):
            _same_band(piece)


def _same_band(piece: Piece) -> None:
    t, s = piece.q1 - piece.q0, piece.k1 - piece.k0
    queries, keys, (left, right) = windows.fitted(piece, t, s)
    assert (left is None or left >= 0) and (right is None or right >= 0)
    want = in_band(piece.left, piece.right, t, s)
    got = np.zeros((t, s), bool)
    # The library puts the last query at the last key.
    got[:queries, :keys] = in_band(left, right, queries, keys, move=keys - queries)
    assert (got == want).all(), piece
