"""Slices of one example's tokens, which XLA passes to a kernel uncopied, aligned to 128 bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from tests.cases import allowed, compare
from tests.gpu.requirements import skip_unless_available
from tests.reference import attention64

T, WHOLE = 31, 40
MASKS = {
    "full": lambda: None,
    "causal": lambda: M.Causal(),
    "window with an offset": lambda: M.BlockSlidingWindow(1, 3, offset=3),
    "lengths": lambda: M.KeyPadding(np.array([17], np.int32)),
    "segments": lambda: M.Segments(*(np.arange(T)[None] // 9,) * 2),
    "blocks": lambda: M.BlockSlidingWindow(8, 2),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "cudnn_flash_te", "tokamax_flash"])
@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize("mask", MASKS)
def test_slices_that_start_anywhere(kernel: str, heads: int, mask: str) -> None:
    skip_unless_available(kernel)
    rng = np.random.default_rng(0)
    whole = [jnp.asarray(rng.normal(size=(1, WHOLE, heads, 32)), jnp.bfloat16) for _ in range(4)]
    config, starts, made = ma.AttentionConfig(attention=kernel), (1, 3, 5, 7), MASKS[mask]()
    call = ma.Call(1, T, T, heads, heads, 32, "bfloat16", mask=M.Full() if made is None else made)
    if ma.plan(call, config.replace(fallback="warn")).fell_back:
        pytest.skip(f"{kernel} refuses {mask}")

    @jax.jit
    def step(*whole: jax.Array) -> Any:
        q, k, v, dout = (x[:, s : s + T] for x, s in zip(whole, starts, strict=True))
        out, pull = jax.vjp(lambda *x: ma.attention(*x, mask=made, config=config), q, k, v)
        return out, *pull(dout)

    got = step(*whole)
    q, k, v, dout = (np.asarray(x[:, s : s + T], "f") for x, s in zip(whole, starts, strict=True))
    want = attention64(q, k, v, allowed(made, T, T), dout=dout)
    compare((got[0], None, *got[1:]), want, 2e-2)
