"""Norm and rotary embedding in one kernel on an NVIDIA GPU, against the same steps of XLA in
float32.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.modules import norm_rope
from maxattn.modules.norm_rope_triton import NormRopeRow
from tests.gpu.requirements import skip_unless_available
from tests.modules.test_norm_rope import CASES, error, float32, made

pytestmark = pytest.mark.gpu
LIMIT = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1e-2}


def judged(row: NormRopeRow, dtype: Any, x: Any, dy: Any, vectors: Any, tables: Any) -> Any:
    """Return the errors of the result and of all gradients."""
    x, dy, vectors, tables = (
        jnp.asarray(x, dtype),
        jnp.asarray(dy, dtype),
        float32(vectors),
        float32(tables),
    )
    got, pull = jax.vjp(lambda *of: norm_rope._on_shard(row, False, *of), x, vectors, tables)
    flat = tuple(a.reshape(-1, a.shape[-1]) for a in tables)
    steps = jax.vjp(
        lambda x, v: norm_rope._in_steps(row, x.reshape(-1, *x.shape[2:]), v, flat).reshape(
            x.shape
        ),
        x.astype(jnp.float32),
        vectors,
    )
    wanted = steps[0], *steps[1](dy.astype(jnp.float32))
    return jax.tree.map(error, float32((got, *pull(dy)[:2])), wanted)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_xla(case: tuple[Any, ...], dtype: str, record_property: Any) -> None:
    skip_unless_available("dot_product")
    n, h, norm, style, b, _, own, bias = case
    row, arrays, vectors, tables = made((n, h, norm, style, b, 1023, own, bias))
    errors = judged(row, dtype, arrays["x"], arrays["dy"], vectors, tables)
    record_property("errors", errors)
    assert all(e < LIMIT[dtype] for e in jax.tree.leaves(errors)), errors


def test_a_module_uses_it() -> None:
    skip_unless_available("dot_product")
    config = ma.AttentionConfig(attention="dot_product")
    module = ma.FlaxAttention(
        256,
        4,
        None,
        64,
        bias=True,
        qk_norm="rms_norm_across_heads",
        config=config,
        dtype=jnp.bfloat16,
        mesh=config.make_mesh(jax.devices()[:1]),
        rngs=nnx.Rngs(0),
    )
    x, rotary = jax.random.normal(jax.random.key(0), (2, 77, 256), jnp.bfloat16), ma.rope_1d(64, 77)
    run = jax.jit(lambda x: module(x, rotary_emb=rotary))
    assert "xla.gpu.triton" in run.lower(x).as_text()
    with ma.Target.named("cpu").assumed():
        want = jax.jit(lambda x: module(x, rotary_emb=rotary))(x)
    np.testing.assert_allclose(
        float32(run(x)), float32(want), atol=2e-2 * float(jnp.max(jnp.abs(want)))
    )
