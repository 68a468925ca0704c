"""Norm and rotary embedding in one kernel on an NVIDIA GPU, against XLA's steps in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.modules.norm_rope import NormRope, in_steps, on_shard
from maxattn.modules.row_kernel.work import RowWork
from maxattn.target import Target
from tests.closeness import distance
from tests.gpu.requirements import skip_unless_available

pytestmark = pytest.mark.gpu
LIMIT = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 1e-2}
# heads, head dim, norm, style, batch, tables of each example, heads of the vectors
CASES: dict[str, tuple[Any, ...]] = {
    "across-interleaved-1536": (12, 128, "across", "interleaved", 2, False, 12),
    "across-half-5120": (40, 128, "across", "half", 1, False, 40),
    "head-interleaved-512": (8, 64, "head", "interleaved", 2, True, 1),
    "head-half-1536": (24, 64, "head", "half", 2, True, 24),
    "head-interleaved-3072": (24, 128, "head", "interleaved", 1, False, 1),
    "across-no_rotary-odd_heads": (5, 64, "across", None, 2, False, 5),
    "no_norm-interleaved-wide_heads": (3, 256, None, "interleaved", 2, False, 3),
    "across-interleaved-832": (13, 64, "across", "interleaved", 2, False, 13),
    "head-half-72": (5, 72, "head", "half", 2, True, 1),
    "across-40": (16, 40, "across", "interleaved", 2, False, 16),
}


@pytest.fixture(autouse=True)
def cute() -> None:
    skip_unless_available("flash")  # fa4-jax brings CuTe


def float32(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)


def normal(rng: np.random.Generator, dtype: Any, *shape: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_xla(case: tuple[Any, ...], dtype: str, record_property: Any) -> None:
    (n, h, norm, style, b, own, heads), rng = case, np.random.default_rng(5)
    gpu = Target.here().device
    work = RowWork(n, h, norm, 1e-6, style)
    how = NormRope(work, gpu.sms, gpu.family.shared_memory)
    width = jnp.dtype(dtype).itemsize
    if not how.launch(width, ("bias", "scale")).fits():
        pytest.skip(f"the kernel cannot take {n} heads of dim {h}")
    x, dy = (normal(rng, dtype, b, 1023, n, h) for _ in range(2))
    vectors = {"bias": normal(rng, "float32", n, h)}
    if norm:
        vectors["scale"] = 1 + 0.3 * normal(rng, "float32", heads, h)
    angles = jnp.asarray(rng.uniform(0, 6, (b if own else 1, 1023, h // 2)), jnp.float32)
    tables = (jnp.cos(angles), jnp.sin(angles)) if style else ()
    got, pull = jax.vjp(lambda *of: on_shard(how, *of), x, vectors, tables)
    wide, exact = jax.vjp(lambda *of: in_steps(work, *of), float32(x), vectors, tables)
    wanted = wide, *exact(float32(dy))[:2]
    errors = jax.tree.map(distance, float32((got, *pull(dy)[:2])), wanted)
    record_property("errors", errors)
    assert all(e < LIMIT[dtype] for e in jax.tree.leaves(errors)), errors


def same_as_by_xla(run: Any, *of: Any, name: str, limit: float) -> None:
    """Compare a module's outputs and gradients with those of XLA's steps."""

    def loss(*of: Any) -> Any:
        return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in run(*of))

    def both() -> Any:
        return *jax.jit(run)(*of), *jax.jit(jax.grad(loss, tuple(range(len(of)))))(*of)

    assert f"cutejax.{name}" in jax.jit(run).lower(*of).as_text()
    got = both()
    with ma.Target.named("cpu").assumed():
        want = both()
    for mine, exact in zip(float32(got), float32(want), strict=True):
        np.testing.assert_allclose(mine, exact, atol=limit * float(jnp.max(jnp.abs(exact))))


@pytest.mark.parametrize("kind", ["self", "joint"])
@pytest.mark.parametrize("qk_norm", ["rms_norm", "rms_norm_across_heads"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_module_uses_it(kind: str, qk_norm: str, batch: int) -> None:
    config, is_joint = ma.AttentionConfig(attention="dot_product"), kind == "joint"
    settings: dict[str, Any] = {
        "heads": 4, "kv_heads": 2, "dim_head": 64, "bias": True, "qk_norm": qk_norm,
        "dtype": jnp.bfloat16, "config": config, "mesh": config.make_mesh(jax.devices()[:1]),
    }  # fmt: skip
    settings |= {"added_kv_proj_dim": 192} if is_joint else {}
    module = (ma.JointAttention if is_joint else ma.FlaxAttention)(
        256, **settings, rngs=nnx.Rngs(0)
    )
    sizes = ((301, 256), (77, 192)) if is_joint else ((301, 256),)
    keys = jax.random.split(jax.random.key(0), len(sizes))
    states = (
        jax.random.normal(key, (batch, *size), jnp.bfloat16)
        for key, size in zip(keys, sizes, strict=True)
    )
    rotary = ma.rope_1d(64, sum(length for length, _ in sizes))

    def run(*states: Any) -> Any:
        found = module(*states, rotary_emb=rotary)
        return found if is_joint else (found,)

    same_as_by_xla(run, *states, name="norm_rotary", limit=3e-2)


def test_forward_mode_of_a_module() -> None:
    """Its tangent t = J x and its gradient agree: |t|^2 is the product of J^T t and x."""
    config = ma.AttentionConfig(attention="dot_product")
    sizes = {"heads": 2, "dim_head": 64, "qk_norm": "rms_norm", "bias": True}
    attn = ma.FlaxAttention(128, **sizes, config=config, dtype="bfloat16", rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 60, 128), "bfloat16")

    @jax.jit
    def products(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        run = partial(attn, rotary_emb=ma.rope_1d(64, 60))
        tangent = jax.jvp(run, (x,), (x,))[1]
        (pulled,) = jax.vjp(run, x)[1](tangent)
        return (float32(tangent) ** 2).sum(), (float32(pulled) * x).sum()

    np.testing.assert_allclose(*products(x), rtol=2e-2)
