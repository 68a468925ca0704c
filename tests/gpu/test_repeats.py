"""Calls that follow each other give the same numbers: a kernel whose threads race gives others now and then."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels import KERNELS
from tests.gpu.there import skip_unless_there

pytestmark = pytest.mark.gpu

CALLS, LENGTH, WIDTH = 100, 4096, 128
MASKS = {
    "full": M.Full(), "causal": M.Causal(), "lengths": M.KeyPadding(np.array([3000])), "window": M.LocalWindow(200, 9),
}  # fmt: skip
ROUNDING = 2**-7  # of the largest entry: gradients that are added up in no fixed order


def most_apart(config: ma.AttentionConfig, mask: M.Mask) -> np.ndarray:
    """Return how far out, dq, dk and dv of later calls are from the first, relative to the largest entry."""
    rng = np.random.default_rng(7)
    x = tuple(jnp.asarray(rng.normal(size=(1, LENGTH, 4, WIDTH)), "bfloat16") for _ in range(4))

    def gradients(q, k, v, dout):
        out, pull = jax.vjp(lambda *x: ma.attention(*x, mask=mask, config=config), q, k, v)
        return out, *pull(dout)

    def apart(got, want):
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.abs(got - want).max() / jnp.abs(want).max()

    @jax.jit
    def run(x):
        first = gradients(*x)

        def again(_, most):
            q = jax.lax.optimization_barrier((x[0], most))[0]  # else XLA would compute it once
            found = [apart(*pair) for pair in zip(gradients(q, *x[1:]), first, strict=True)]
            return jnp.maximum(most, jnp.stack(found))

        return jax.lax.fori_loop(0, CALLS, again, jnp.zeros(4))

    return np.asarray(run(x))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", ["cudnn", "cudnn_flash_te", "flash", "tokamax_flash", "dot_product"])
def test_every_call_gives_what_the_first_gave(kernel: str, mask: str) -> None:
    skip_unless_there(kernel)
    x = jax.ShapeDtypeStruct((1, LENGTH, 4, WIDTH), "bfloat16")
    repeats = KERNELS[kernel].repeats(ma.Call.of(x, x), ma.Target.here()) is None
    found = most_apart(ma.AttentionConfig(attention=kernel, deterministic=repeats), MASKS[mask])
    assert found[0] == 0, "the forward varies"
    assert (found == 0).all() if repeats else (found < ROUNDING).all(), dict(
        zip(("out", "dq", "dk", "dv"), found, strict=True)
    )
