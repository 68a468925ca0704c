"""If the backward of a scan over layers saves attention's results, each forward runs once."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import maxattn as ma
from maxattn._attention import run
from maxattn.masks import Full
from tests.gpu.requirements import skip_unless_available

FORWARD = {
    "flash": r"custom_call_target=\"cutejax\.(fa4_fwd|maxattn_forward)",
    "cudnn": r"custom_call_target=\"__cudnn\$fmhaSoftmax\"",
}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", FORWARD)
def test_attention_runs_forward_once_a_layer(kernel: str) -> None:
    skip_unless_available(kernel)
    config = ma.AttentionConfig(attention=kernel, remat_policy="SAVE_ATTENTION")  # type: ignore[arg-type]

    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        q = (x @ w).reshape(1, 512, 2, 64)
        return x + ma.attention(q, q, q, config=config).reshape(x.shape) @ w

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        kept = ma.remat(block, config)
        return jax.lax.scan(lambda x, w: (kept(w, x), None), x, ws)[0].astype(jnp.float32).sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 128, 128), (1, 512, 128))]
    program = nnx.jit(jax.grad(loss)).lower(*shapes).compile().as_text() or ""
    assert len(re.findall(FORWARD[kernel], program)) == 1


@pytest.mark.parametrize(("device", "barriers"), [("NVIDIA H200", 1), ("cpu", 0)])
def test_only_a_gpus_plan_has_the_barrier(device: str, barriers: int) -> None:
    x: Any = jnp.ones((1, 8, 2, 4))
    config = ma.AttentionConfig(attention="dot_product")
    plan = ma.plan(ma.Call.of(x, x), config, target=ma.Target.named(device))
    grad = jax.make_jaxpr(jax.grad(lambda q: run(plan, q, q, q, None, Full())[0].sum()))
    assert str(grad(x)).count("optimization_barrier") == barriers
