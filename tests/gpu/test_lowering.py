"""How masks are written for FlashAttention-4 and tokamax: bands, intervals and ids that allow what
the mask allows.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels import mask_split
from maxattn.kernels.fa4 import kernel, mask_inputs
from maxattn.kernels.fused import masks as fused_masks
from maxattn.kernels.fused import tokamax_mosaic
from maxattn.kernels.fused.pieces import Piece, pieces
from tests.cases import LENGTHS, MASKS, allowed

PAIRS = [name for name in MASKS if name not in ("full", "dense", "dense heads", "not segments")]
INTERVALS = ["causal", "window", "block window", "block causal", "causal & lengths", "rows empty"]


def arrays(length: str) -> tuple:
    t, s = LENGTHS[length]
    return jnp.zeros((3, t, 2, 8)), jnp.zeros((3, s, 2, 8)), t, s


def in_band(left: int | None, right: int | None, t: int, s: int, move: int = 0) -> np.ndarray:
    apart = np.arange(s)[None] - np.arange(t)[:, None] - move
    ok = np.ones((t, s), bool) if left is None else apart >= -left
    return ok if right is None else ok & (apart <= right)


@pytest.mark.parametrize("length", ["64", "odd", "cross"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_allow_what_the_mask_allows(name: str, length: str) -> None:
    q, k, t, s = arrays(length)
    mask = MASKS[name](3, 2, t, s).bind(t, s, 3, 2)
    if not isinstance(mask_split.split(mask), mask_split.Split):
        pytest.skip("not for FlashAttention-4")
    piece, found = mask_inputs.pairs_of(mask, q, k, 0, 0)
    ok = in_band(piece.left, piece.right, t, s)[None]
    if found.lo is not None:
        key = np.arange(s)
        inside = (key >= np.asarray(found.lo)[..., None]) & (key < np.asarray(found.hi)[..., None])
        ok = ok & inside.any(0)[None]
    if found.q_ids is not None:
        ok = ok & (np.asarray(found.q_ids)[:, :, None] == np.asarray(found.kv_ids)[:, None])
    want = np.broadcast_to(allowed(mask, t, s)[:, 0], (3, t, s))
    assert (np.broadcast_to(ok, want.shape) == want).all()


@pytest.mark.parametrize("length", ["64", "odd", "cross"])
@pytest.mark.parametrize("name", INTERVALS)
def test_tokamax_gets_each_querys_interval(name: str, length: str) -> None:
    q, k, t, s = arrays(length)
    mask = MASKS[name](3, 2, t, s).bind(t, s, 3, 2)
    if tokamax_mosaic._refuse_rows(fused_masks.split(mask)) is not None:
        pytest.skip("several intervals")
    _, found = tokamax_mosaic._intervals(mask, q, k, 0, 0)
    key = np.arange(s)
    ok = (key >= np.asarray(found.lo)[..., None]) & (key < np.asarray(found.hi)[..., None])
    want = np.broadcast_to(allowed(mask, t, s)[:, 0], (3, t, s))
    assert (np.broadcast_to(ok, want.shape) == want).all()


@pytest.mark.parametrize("band", [(None, 0), (4, 0), (3, 5), (2, None)])
@pytest.mark.parametrize("lengths", [(6, 6), (4, 12), (9, 6)])
def test_a_band_as_flash_attention_counts_it(band: tuple, lengths: tuple[int, int]) -> None:
    t, s = lengths
    for shift in range(-t - 6, s + 6):
        for piece in pieces(fused_masks.Band(*band), shift, t, s):
            _same_band(piece)


def _same_band(piece: Piece) -> None:
    t, s = piece.q1 - piece.q0, piece.k1 - piece.k0
    queries, keys, (left, right) = kernel._fitted(piece, t, s)
    assert (left is None or left >= 0) and (right is None or right >= 0)
    want = in_band(piece.left, piece.right, t, s)
    got = np.zeros((t, s), bool)
    # The library puts the last query at the last key.
    got[:queries, :keys] = in_band(left, right, queries, keys, move=keys - queries)
    assert (got == want).all(), piece
