"""Cross-attention to texts of every length that the models have: forward and gradients. That TPUs'
compiler takes them is in tests/block_sizes/test_compiles.py.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from tests.reference import attention64
from tests.waiting import but

LENGTHS = (1, 77, 226, 257, 300, 333, 600, 1000, 1300)
# One token, several tiles, and a tile that is not full.
FEW = [*(("flash", n) for n in (1, 333, 1300)), ("tokamax_flash", 1300)]


@pytest.mark.parametrize(
    ("kernel", "length"), but(product(("flash", "tokamax_flash"), LENGTHS), FEW)
)
def test_forward_and_gradients(kernel: str, length: int) -> None:
    """77 queries of a text of `length` tokens; the second batch row has two thirds of them."""
    if kernel == "tokamax_flash":
        pytest.importorskip("tokamax")
    rng = np.random.default_rng(length)
    q, dout = (jnp.asarray(rng.normal(size=(2, 77, 2, 64)), "float32") for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(2, length, 2, 64)), "float32") for _ in range(2))
    lengths = np.array([length, -(-2 * length // 3)], np.int32)
    config = ma.AttentionConfig(
        cross_attention=kernel, flash_block_sizes={"block_kv": 512, "block_kv_compute": 256}
    )

    @jax.jit
    def run(q, k, v):
        attend = partial(ma.attention, mask=M.KeyPadding(lengths), config=config, role="cross")
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    ok = np.arange(length) < lengths[:, None, None, None]
    want = attention64(q, k, v, ok, dout=dout)
    for got, exact in zip(run(q, k, v), (want.out, want.dq, want.dk, want.dv), strict=True):
        # One key's dQ and dK are 0, so rounding is measured against 1 where a gradient is smaller.
        assert np.abs(np.asarray(got) - exact).max() < 2e-5 * max(1.0, np.abs(exact).max())
