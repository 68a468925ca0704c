"""Equal blocks as rows of the batch, in every kernel of a GPU, against float64."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels import as_batch_rows, refusal
from tests.cases import judge
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu
KERNELS = ("flash", "cudnn", "cudnn_flash_te", "tokamax_flash", "dot_product")


class Case(NamedTuple):
    """Say what is computed: queries, keys, head dim, heads and a mask, of two batch rows."""

    mask: M.Mask
    t: int
    s: int = 0
    head_dim: int = 64
    heads: tuple[int, int] = (4, 4)
    dtype: str = "bfloat16"


CASES = {
    "segments": Case(M.Segments.of_lengths((256,) * 4), 1024, head_dim=128),
    "odd segments, shared heads": Case(M.Segments.of_lengths((150,) * 5), 750, heads=(4, 2)),
    "short segments": Case(M.Segments.of_lengths((24,) * 20), 480, dtype="float16"),
    "block window": Case(M.BlockSlidingWindow(390, 1), 1560, head_dim=72),
    "frames": Case(M.VideoMask(6, 60, frames_per_block=2, window=1), 360, head_dim=96),
    "causal segments": Case(M.Segments.of_lengths((200,) * 4) & M.Causal(), 800, head_dim=128),
    "windows of segments": Case(M.Segments.of_lengths((256,) * 3) & M.LocalWindow(40, 9), 768),
    "texts": Case(M.Segments.of_lengths((300,) * 4, (77,) * 4), 1200, 308, head_dim=160),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", list(CASES))
def test_against_float64(kernel: str, name: str) -> None:
    case = CASES[name]
    rng, (n, kv_heads), s = np.random.default_rng(7), case.heads, case.s or case.t
    sizes = (case.t, n), (s, kv_heads), (s, kv_heads), (case.t, n)
    q, k, v, dout = (
        jnp.asarray(rng.normal(size=(2, *size, case.head_dim)), case.dtype) for size in sizes
    )
    call = ma.Call.of(q, k, mask=case.mask)
    assert as_batch_rows(call) is not call
    if reason := refusal(kernel, call, ma.Target.here()):
        pytest.skip(str(reason))
    allowed = case.mask.bind(case.t, s).allowed(np.arange(case.t), np.arange(s))
    want = attention64(q, k, v, np.asarray(allowed), dout=dout)
    config = ma.AttentionConfig(attention=kernel)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        attend = partial(ma.attention, mask=case.mask, config=config, return_lse=True)
        (out, lse), back = jax.vjp(attend, q, k, v)
        return out, lse, *back((dout, jnp.zeros_like(lse)))

    found = dict(zip(("out", "lse", "dq", "dk", "dv"), jax.jit(both)(q, k, v, dout), strict=True))
    errors = {key: error(x, getattr(want, key)) for key, x in found.items()}
    judge({"dtype": case.dtype}, errors)
