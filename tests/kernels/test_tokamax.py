"""Tests of tokamax alone: its tile schedule, its exp2 and base-2 LSE, rings, and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.block_sizes import BlockSizes
from maxattn.kernels.splash.tokamax import steps
from maxattn.kernels.tokamax_flash import TokamaxFlash
from tests.cases import compare
from tests.kernels.test_flash import POSITIONS, whole
from tests.reference import attention64
from tests.waiting import but

pytest.importorskip("tokamax")
SIZES = BlockSizes(128, 128, 128, 128, 256, 128, use_fused_bwd_kernel=True)


@pytest.mark.parametrize("density", [0.0, 0.1, 0.6, 1.0])
def test_the_steps_are_the_tiles_that_are_not_empty(density: float) -> None:
    rng = np.random.default_rng(3)
    marks = ((rng.random((9, 13)) < density) * rng.integers(1, 3, (9, 13))).astype(np.int8)
    want = [(i, j, marks[i, j]) for i in range(9) for j in range(13) if marks[i, j]]
    row, column, flat, count = jax.jit(steps)(jnp.asarray(marks))
    n = int(count[0])
    assert [tuple(map(int, x)) for x in zip(row[:n], column[:n], flat[:n], strict=True)] == want
    assert (np.asarray(row)[n:] == -1).all()
    static = [*zip(*(x.tolist() for x in steps(marks)[:3]), strict=True)]
    # A grid has a step at least; where nothing is visited it computes a tile that is thrown away.
    assert static == (want or [(0, 0, 1)])


MERGED = [("full", True), ("blocks", True), ("video", True), ("blocks", False)]


@pytest.mark.parametrize(("name", "base2"), but(MERGED, MERGED[:3]))
def test_shards_with_traced_offsets_and_a_merged_lse(name: str, base2: bool) -> None:
    kernel = TokamaxFlash(64**-0.5, SIZES, interpret=True, use_base2_exp=base2)
    compare(*whole(POSITIONS[name], kernel))


def test_exp2_in_bfloat16_has_no_bias() -> None:
    """log2(e) rounded to bfloat16 is 0.18% too large, which would shift every LSE."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(3 * rng.normal(size=(1, 256, 2, 128)), "bfloat16") for _ in range(3))
    config = ma.AttentionConfig(attention="tokamax_flash", use_base2_exp=True)
    _, lse = ma.attention(q, k, v, config=config, return_lse=True)
    assert abs(float(np.mean(np.asarray(lse, np.float64) - attention64(q, k, v).lse))) < 2e-3
