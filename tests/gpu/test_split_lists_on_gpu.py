"""FlashAttention-4 over lists in splits on a Hopper GPU, against float64: few keys, few queries."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.fa4.kernel import Fa4
from tests.cases import TOLERANCE
from tests.gpu.test_block_sparse_on_gpu import skip_without_block_sparse
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(8)


def ids(batch: int, t: int, s: int) -> M.Mask:
    return M.Segments(*(np.sort(RNG.integers(0, 3, (batch, n)), 1) for n in (t, s)))


# (B, T, S, N, K, H), the mask, and what is split.
CASES: dict[str, tuple[tuple[int, ...], M.Mask, str]] = {
    "causal": ((2, 5000, 257, 2, 2, 128), M.Causal(0), "queries"),
    "causal, shared heads": ((2, 5000, 257, 4, 2, 128), M.Causal(0), "queries"),
    "before the keys": ((1, 4000, 200, 3, 3, 64), M.Causal(-1000), "queries"),
    "window": ((2, 5000, 300, 2, 2, 64), M.LocalWindow(4000, 9, offset=0), "queries"),
    "few see": ((1, 5000, 300, 2, 1, 96), M.LocalWindow(2500, 9, offset=0), "queries"),
    "blocks": ((2, 5000, 130, 2, 2, 72), M.BlockCausal(390, 0), "queries"),
    "head dim 256": ((1, 4000, 100, 2, 2, 256), M.Causal(0), "queries"),
    "head dim 136": ((1, 4000, 100, 4, 2, 136), M.Causal(0), "queries"),
    "segments": ((2, 6000, 300, 2, 2, 128), ids(2, 6000, 300), "queries"),
    "shared segments": ((2, 6000, 300, 4, 2, 128), ids(1, 6000, 300), "queries"),
    "lengths, shared heads": (
        (2, 6000, 300, 4, 2, 128),
        M.KeyPadding(np.array([70, 300], np.int32)),
        "queries",
    ),
    "cached window": ((2, 300, 9000, 4, 2, 128), M.LocalWindow(6000, 9), "keys"),
    "cached blocks": ((1, 390, 9000, 4, 4, 64), M.BlockSlidingWindow(390, 20), "keys"),
    "cached, before": ((1, 260, 9000, 2, 2, 40), M.LocalWindow(6000, 9, offset=8900), "keys"),
    "cached, head dim 256": ((1, 300, 9000, 4, 2, 256), M.LocalWindow(6000, 9), "keys"),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, dtype: str) -> None:
    skip_without_block_sparse()
    (b, t, s, n, kv, h), mask, split = CASES[name]
    shapes = (b, t, n, h), (b, s, kv, h), (b, s, kv, h), (b, t, n, h)
    q, k, v, dout = (jnp.asarray(RNG.normal(size=shape), dtype) for shape in shapes)
    mask = mask.bind(t, s, b, n)
    ok = np.asarray(mask.allowed(np.arange(t), np.arange(s)))
    dlse = jnp.where(ok.any(-1), jnp.asarray(RNG.normal(size=(b, n, t)), "float32"), 0.0)
    config = ma.AttentionConfig(attention="flash")
    call = ma.Call.of(q, k, mask, return_lse=True)
    kernel = ma.plan(call, config).kernel
    assert isinstance(kernel, Fa4) and f"splits of the {split}" in " ".join(kernel.lines(call))

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        run = partial(ma.attention, mask=mask, config=config, return_lse=True)
        (out, lse), vjp = jax.vjp(run, q, k, v)
        return out, lse, *vjp((dout, dlse))

    got, want = both(q, k, v), attention64(q, k, v, ok, dout=dout, dlse=dlse)
    names = "out", "lse", "dq", "dk", "dv"
    errors = {name: error(g, w) for name, g, w in zip(names, got, want, strict=False)}
    assert max(errors.values()) < TOLERANCE[dtype], errors
    hidden = np.broadcast_to(~ok.any(-1), got[1].shape)
    assert (np.isinf(np.asarray(got[1])) == hidden).all()
    assert (np.asarray(got[2], np.float32).swapaxes(1, 2)[hidden] == 0).all()
