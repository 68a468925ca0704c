"""Unions of many rectangles by FlashAttention-4, and forward mode of a module (`make test-gpu`)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import masks as M
from tests.cases import draw_operands, judge_call
from tests.gpu.requirements import skip_unless_available

pytestmark = pytest.mark.gpu

LENGTH = 1500
MADE = {
    "small steps": [M.Rectangle(i, i + 10, max(0, i - 90), i + 10) for i in range(0, LENGTH, 10)],
    "several intervals": [
        M.Rectangle(i, i + 50, j, j + 20)
        for i in range(0, LENGTH, 50)
        for j in range(i % 7, i, 200)
    ],
    "whole tiles": [M.Rectangle(i, i + 128, 0, i + 128) for i in range(0, LENGTH - 127, 128)]
    + [M.Rectangle(i, i + 3, i, i + 3) for i in range(0, LENGTH, 30)],
}


@pytest.mark.parametrize("name", MADE)
def test_many_rectangles(name: str) -> None:
    skip_unless_available("flash")
    mask, config = M.Or(tuple(MADE[name])), ma.AttentionConfig(attention="flash")
    drawn = draw_operands(1, LENGTH, LENGTH, 2, 2, 64)
    x = {key: jnp.asarray(y, "bfloat16") for key, y in drawn.items()} | {"dlse": drawn["dlse"]}
    allowed = np.zeros((LENGTH, LENGTH), bool)
    for one in MADE[name]:
        allowed[one.q_start : one.q_stop, one.kv_start : one.kv_stop] = True
    attend = partial(ma.attention, mask=mask, config=config, return_lse=True)
    judge_call(attend, x | {"dlse": x["dlse"] * allowed.any(-1)}, M.Dense(allowed), 2e-2)


def test_forward_mode_of_a_module() -> None:
    """The tangent t = J x and the gradient agree if |t|^2 is the inner product of J^T t and x."""
    config = ma.AttentionConfig(attention="dot_product")
    sizes = {"heads": 2, "dim_head": 64, "qk_norm": "rms_norm", "bias": True}
    attn = ma.FlaxAttention(128, **sizes, config=config, dtype="bfloat16", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 60, 128), "bfloat16")

    @jax.jit
    def products(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            return attn(x, rotary_emb=ma.rope_1d(64, 60))

        tangent = jax.jvp(run, (x,), (x,))[1]
        (pulled,) = jax.vjp(run, x)[1](tangent)
        return (tangent.astype("float32") ** 2).sum(), (pulled.astype("float32") * x).sum()

    by_tangent, by_gradient = products(x)
    np.testing.assert_allclose(by_tangent, by_gradient, rtol=2e-2)
