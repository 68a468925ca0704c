"""Every size of tile that FlashAttention-4's forward takes, and folded heads, against float64."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.fa4 import fold_groups
from tests.cases import judge
from tests.gpu.test_block_sparse_on_gpu import skip_without_block_sparse
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu


class Case(NamedTuple):
    """Say what is computed: queries, keys, head dim, heads and a mask."""

    t: int
    s: int
    head_dim: int
    heads: int = 3
    kv_heads: int = 0
    mask: M.Mask = M.Full()
    dtype: str = "bfloat16"


IDS = np.sort(np.random.default_rng(3).integers(0, 6, (2, 700)), axis=1).astype(np.int32)
FEW = np.sort(np.random.default_rng(4).integers(0, 4, (2, 64)), axis=1).astype(np.int32)
LENGTHS = M.KeyPadding(np.array([150, 61], np.int32))
# Keys that end in the last tile of every number of keys, and queries of every number of rows.
CASES = [
    Case(t, s, h, dtype=dtype)
    for h, dtype in ((40, "float16"), (64, "bfloat16"), (72, "bfloat16"), (96, "float16"))
    for t, s in ((60, 77), (64, 300), (700, 48), (1000, 226), (2100, 333))
]
CASES += [
    Case(t, s, h)
    for h in (128, 136, 160, 176, 192, 256)
    for t, s in ((60, 77), (50, 500), (700, 33), (700, 257), (900, 512))
]
# Many heads: persistent thread blocks take several rows each.
CASES += [Case(600, 77, h, heads=120) for h in (64, 80, 96, 128, 160, 192, 256)]
CASES += [Case(600, 200, h, heads=60, mask=LENGTHS) for h in (64, 72, 128, 160, 192, 256)]
CASES += [
    Case(700, 700, h, mask=mask, heads=heads)
    for h in (64, 72, 128, 160, 192, 256)
    for mask, heads in (
        (M.LocalWindow(60, 0), 60),
        (M.Segments(IDS, IDS), 3),
        (M.Segments.of_lengths((100, 37, 250, 313)), 60),
    )
]
# So few queries that a backward's tile has half as many.
CASES += [
    Case(t, s, h, heads=heads, kv_heads=kv_heads, mask=mask)
    for h, heads, kv_heads in ((40, 150, 150), (64, 150, 150), (64, 8, 2), (96, 150, 150))
    for t, s, mask in (
        (64, 64, M.Causal()),
        (50, 64, M.LocalWindow(20, 9)),
        (64, 64, M.Segments(FEW, FEW)),
        (64, 64, M.Segments.of_lengths((20, 30, 14))),
        (60, 200, LENGTHS),
    )
]
CASES += [
    Case(t, s, h, heads=heads, kv_heads=kv_heads, dtype=dtype)
    for h, dtype in ((104, "bfloat16"), (112, "float16"), (128, "bfloat16"))
    for t, s, heads, kv_heads in (
        (60, 300, 150, 150),
        (128, 128, 150, 150),
        (190, 77, 150, 50),
        (256, 513, 75, 75),
    )
]
# More heads than a GPU caches the keys of: those that it does go through their rows first.
CASES += [
    Case(1100, 1100, 128, 36, mask=M.Causal()),
    Case(1000, 1000, 256, 24, mask=M.Causal(), dtype="float16"),
    Case(900, 1000, 160, 24, 8, mask=M.Causal()),
    Case(1000, 1000, 256, 36, mask=M.Segments.of_lengths((300, 500, 200))),
]
FOLDED = [
    Case(64, 143, 40, 32, 4),
    Case(64, 64, 128, 2, 1, dtype="float16"),
    Case(256, 600, 64, 8, 2),
    Case(300, 200, 72, 8, 4, LENGTHS),
    Case(100, 200, 128, 8, 2, LENGTHS),
    Case(200, 700, 160, 4, 2),
    Case(1, 900, 256, 8, 2),
]


@pytest.mark.parametrize("case", [*CASES, *FOLDED], ids=str)
def test_against_float64(case: Case) -> None:
    skip_without_block_sparse()
    rng, kv_heads = np.random.default_rng(7), case.kv_heads or case.heads
    sizes = (case.t, case.heads), (case.s, kv_heads), (case.s, kv_heads), (case.t, case.heads)
    q, k, v, dout = (
        jnp.asarray(rng.normal(size=(2, *size, case.head_dim)), case.dtype) for size in sizes
    )
    bound = case.mask.bind(case.t, case.s)
    allowed = bound.allowed(np.arange(case.t), np.arange(case.s))
    want = attention64(q, k, v, None if case.mask.is_full else np.asarray(allowed), dout=dout)
    config = ma.AttentionConfig(attention="flash")

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ma.attention(q, k, v, mask=case.mask, config=config)

    out, back = jax.vjp(jax.jit(call), q, k, v)
    found = dict(zip(("dq", "dk", "dv"), jax.jit(back)(dout), strict=True))
    errors = {name: error(x, getattr(want, name)) for name, x in found.items()}
    judge({"dtype": case.dtype}, {"out": error(out, want.out), **errors})


@pytest.mark.parametrize("case", FOLDED, ids=str)
def test_these_heads_are_folded(case: Case) -> None:
    queries, keys = (2, case.t, case.heads), (2, case.s, case.kv_heads)
    assert fold_groups.pays(queries, keys) is (case.t != 300)
