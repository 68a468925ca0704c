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
from maxattn.modules.norm_rope import NormRopeRow, fused
from maxattn.modules.norm_rope.fused import Work
from maxattn.modules.norm_rope.path import cute_takes
from maxattn.modules.norm_rope.triton_row import TritonRow
from maxattn.target import Target
from tests.gpu.requirements import skip_unless_available
from tests.modules.test_norm_rope import CASES, error, float32, made

pytestmark = pytest.mark.gpu
LIMIT = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1e-2}


def judged(
    row: NormRopeRow, by: str, dtype: Any, x: Any, dy: Any, vectors: Any, tables: Any
) -> Any:
    """Return the errors of the result and of all gradients."""
    x, dy, vectors, tables = (
        jnp.asarray(x, dtype),
        jnp.asarray(dy, dtype),
        float32(vectors),
        float32(tables),
    )
    got, pull = jax.vjp(lambda *of: fused.on_shard(Work(row, by), *of), x, vectors, tables)
    flat = tuple(a.reshape(-1, a.shape[-1]) for a in tables)
    steps = jax.vjp(
        lambda x, v: fused.in_steps(row, x.reshape(-1, *x.shape[2:]), v, flat).reshape(x.shape),
        x.astype(jnp.float32),
        vectors,
    )
    wanted = steps[0], *steps[1](dy.astype(jnp.float32))
    return jax.tree.map(error, float32((got, *pull(dy)[:2])), wanted)


CASES_OF_CUTE = {
    "head-half-72": (5, 72, "head", "half", 2, 3, True, True),
    "across-40": (16, 40, "across", "interleaved", 2, 3, False, True),
}


def takes(by: str, row: NormRopeRow) -> bool:
    return TritonRow.of(row).fits() if by == "triton" else cute_takes(row)


@pytest.mark.parametrize("by", ["triton", "cute"])
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("case", (CASES | CASES_OF_CUTE).values(), ids=CASES | CASES_OF_CUTE)
def test_against_xla(case: tuple[Any, ...], dtype: str, by: str, record_property: Any) -> None:
    skip_unless_available("dot_product")
    if by == "cute" and Target.here().version("fa4-jax") is None:
        pytest.skip("needs fa4-jax, which brings CuTe")
    n, h, norm, style, b, _, own, bias = case
    row, arrays, vectors, tables = made((n, h, norm, style, b, 1023, own, bias))
    if not takes(by, row):
        pytest.skip(f"{by} takes no rows of {n} x {h}")
    errors = judged(row, by, dtype, arrays["x"], arrays["dy"], vectors, tables)
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
    text = run.lower(x).as_text()
    assert "xla.gpu.triton" in text or "cutejax.norm_rotary" in text
    with ma.Target.named("cpu").assumed():
        want = jax.jit(lambda x: module(x, rotary_emb=rotary))(x)
    np.testing.assert_allclose(
        float32(run(x)), float32(want), atol=2e-2 * float(jnp.max(jnp.abs(want)))
    )


@pytest.mark.parametrize("qk_norm", ["rms_norm", "rms_norm_across_heads"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_joint_sequence_is_written_in_place(qk_norm: str, batch: int) -> None:
    skip_unless_available("dot_product")
    if Target.here().version("fa4-jax") is None:
        pytest.skip("needs fa4-jax, which brings CuTe")
    module = ma.JointAttention(
        256, 192, 4, dim_head=64, bias=True, qk_norm=qk_norm, dtype=jnp.bfloat16,
        config=ma.AttentionConfig(attention="dot_product"), rngs=nnx.Rngs(0),
    )  # fmt: skip
    keys = jax.random.split(jax.random.key(1), 2)
    x, text = (
        jax.random.normal(key, (batch, n, c), jnp.bfloat16)
        for key, n, c in zip(keys, (301, 77), (256, 192), strict=True)
    )
    rotary = ma.rope_1d(64, 378)

    def run(x: Any, text: Any) -> Any:
        return module(x, text, rotary_emb=rotary)

    def loss(x: Any, text: Any) -> Any:
        return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in run(x, text))

    assert "norm_rotary_into" in jax.jit(run).lower(x, text).as_text()
    got = *jax.jit(run)(x, text), *jax.jit(jax.grad(loss, (0, 1)))(x, text)
    with ma.Target.named("cpu").assumed():
        want = *jax.jit(run)(x, text), *jax.jit(jax.grad(loss, (0, 1)))(x, text)
    for mine, theirs in zip(float32(got), float32(want), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=3e-2 * float(jnp.max(jnp.abs(theirs))))
