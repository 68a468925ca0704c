"""Rows of tiles that are known when tracing, on a Hopper GPU, against float64: uneven short ones,
which thread blocks take as soon as they are free, and long ones of a band by lists.
"""

from __future__ import annotations

import jax
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.fa4 import band_lists
from tests.cases import TOLERANCE
from tests.gpu.test_block_sparse_on_gpu import skip_without_block_sparse
from tests.gpu.test_row_lists_on_gpu import CONFIG, both, judge, operands
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu

UNEVEN = {
    "causal": (M.Causal(), 1000, 1000),
    "causal, more queries": (M.Causal(0), 1111, 900),
    "window": (M.LocalWindow(700, 100), 1000, 1000),
    "segments": (M.Segments.of_lengths((200, 600, 37, 300, 77)), 1214, 1214),
}


@pytest.mark.parametrize("head_dim", [72, 128, 160])
@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_rows(name: str, head_dim: int) -> None:
    skip_without_block_sparse()
    mask, t, s = UNEVEN[name]
    x = operands(t, s, head_dim, (66, 66), "bfloat16")
    call = ma.Call.of(x["q"], x["k"], mask.bind(t, s))
    if head_dim > 72:  # of shorter heads more rows are one group, and even
        assert band_lists.forward_order(call, x["q"].shape).dynamic
    run = jax.jit(lambda q, k, v: ma.attention(q, k, v, mask=mask, config=CONFIG, return_lse=True))
    ok = mask.bind(t, s).allowed(*(jax.numpy.arange(n) for n in (t, s)))
    want = attention64(x["q"], x["k"], x["v"], ok)
    for _ in range(3):  # in whatever order the thread blocks come
        for got, right in zip(run(x["q"], x["k"], x["v"]), want[:2], strict=True):
            assert error(got, right) < TOLERANCE["bfloat16"]


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("mask", [M.Causal(), M.LocalWindow(2500, 40)])
def test_long_rows_of_a_band(mask: M.Mask, head_dim: int) -> None:
    skip_without_block_sparse()
    length = 4187
    x = operands(length, length, head_dim, (8, 4), "bfloat16")
    call = ma.Call.of(x["q"], x["k"], mask.bind(length, length))
    assert band_lists.gains_by_lists(call, x["q"].shape)
    judge(jax.jit(both)(mask, *x.values()), x, mask, "bfloat16")
