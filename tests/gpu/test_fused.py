"""What is around the GPU libraries, on a CPU: rectangles of a mask, merging, lengths, flags, the
LSE's gradient.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.fused import masks
from maxattn.kernels.fused.pieces import fits_shards, pieces, shifts
from maxattn.masks import Full
from tests.cases import BIASES, HEADS, LENGTHS, MASKS, allowed, arrays
from tests.gpu.dense import DenseLibrary
from tests.pairwise import pairwise
from tests.reference import attention64, error

TAKEN = ["full", "causal", "window", "lengths", "flags", "causal & lengths", "nothing"]
AXES = {
    "mask": TAKEN,
    "heads": ["mha", "gqa"],
    "length": ["64", "odd", "cross", "one"],
    "head_dim": [20],
    "batch": [3],
    "traced": [False, True],
    "bias": ["none"],
    "dtype": ["float32"],
}


def legal(case: dict) -> bool:
    """Between shards, kernels take bands where queries and keys are split alike."""
    t, s = LENGTHS[case["length"]]
    mask = MASKS[case["mask"]](1, 1, t, s)
    return not case["traced"] or mask is None or fits_shards(masks.split(mask.bind(t, s)), t, s)


@pytest.mark.parametrize(
    "case", pairwise(AXES, legal), ids=lambda c: "-".join(map(str, c.values()))
)
def test_around_a_dense_library(case: dict) -> None:
    x = arrays(case)
    t, s = x["q"].shape[1], x["k"].shape[1]
    ok = allowed(x["mask"], t, s)
    dlse = jnp.where(True if ok is None else ok.any(-1), x["dlse"], 0.0)
    mask = (
        Full()
        if x["mask"] is None
        else x["mask"].bind(t, s, case["batch"], HEADS[case["heads"]][0])
    )
    kernel = DenseLibrary(case["head_dim"] ** -0.5, lse_gradient=True)

    @partial(jax.jit, static_argnums=() if case["traced"] else 0)
    def both(offset, q, k, v, mask):
        out, lse = kernel.forward(Inputs(q, k, v, None, mask, offset))
        return (
            out,
            lse,
            *kernel.backward(Inputs(q, k, v, None, mask, offset), Rows(out, lse, x["dout"], dlse))[
                :3
            ],
        )

    got = both(0, x["q"], x["k"], x["v"], mask)
    want = attention64(x["q"], x["k"], x["v"], ok, dout=x["dout"], dlse=dlse)
    errors = {
        n: error(g, w) for n, g, w in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=False)
    }
    assert BIASES[case["bias"]] is None and max(errors.values()) < 2e-5, errors


@pytest.mark.parametrize(
    "band",
    [masks.Band(), masks.Band(None, 0), masks.Band(4, 0), masks.Band(3, 5), masks.Band(2, None)],
)
@pytest.mark.parametrize("lengths", [(6, 6), (4, 12), (9, 6), (1, 7)])
def test_pieces_say_the_band_at_every_shift(band: masks.Band, lengths: tuple[int, int]) -> None:
    t, s = lengths
    for shift in range(-t - 8, s + 8):
        want = _band(band, shift, t, s)
        got = np.zeros((t, s), int)
        for p in pieces(band, shift, t, s):
            assert p.left is None or p.left >= 0
            assert p.right is None or p.right >= 0
            got[p.q0 : p.q1, p.k0 : p.k1] += _band(
                masks.Band(p.left, p.right), 0, p.q1 - p.q0, p.k1 - p.k0
            )
        assert (got == want).all(), (band, shift, pieces(band, shift, t, s))


@pytest.mark.parametrize(
    "band", [masks.Band(None, 0), masks.Band(4, 0), masks.Band(3, 5), masks.Band(None, 0, 7)]
)
@pytest.mark.parametrize("lengths", [(6, 6), (4, 12), (12, 4)])
def test_shifts_hold_every_distance_of_shards(band: masks.Band, lengths: tuple[int, int]) -> None:
    t, s = lengths
    cases = shifts(band, t, s)
    for i in range(6):
        for j in range(6):
            shift = i * t - j * s + band.offset
            nearest = min(max(shift, cases[0]), cases[-1])
            assert nearest in cases
            assert (_band(band, nearest, t, s) == _band(band, shift, t, s)).all()


def _band(band: masks.Band, shift: int, t: int, s: int) -> np.ndarray:
    row, key = np.arange(t)[:, None] + shift, np.arange(s)[None]
    low = np.ones((t, s), bool) if band.left is None else key >= row - band.left
    return low if band.right is None else low & (key <= row + band.right)
