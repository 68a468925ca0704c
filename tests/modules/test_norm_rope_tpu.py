"""Bias, norm, rotary embedding and transpose in a TPU kernel, interpreted, against float64."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.modules.norm_rope import NormRope, decide, in_steps, on_shard
from maxattn.modules.norm_rope_tpu import why_not
from maxattn.modules.row_kernel.work import RowWork
from tests.waiting import but

V6E = ma.Target.named("TPU v6e")


class Case(NamedTuple):
    """The heads of a call; `tables` is the number of batch rows with rotary tables of their own."""

    norm: str | None
    style: str | None
    heads: int
    head_dim: int
    length: int
    scale_of_heads: bool = False
    tables: int = 1
    dtype: str = "float32"


CASES = {
    "wan": Case("across", "interleaved", 2, 128, 100, scale_of_heads=True),
    "flux": Case("head", "interleaved", 2, 128, 64),
    "half": Case("head", "half", 2, 128, 33),
    "half in one register": Case("across", "half", 4, 64, 50, scale_of_heads=True),
    "four heads in a register": Case("head", "interleaved", 8, 32, 40),
    "heads over three registers": Case("across", "interleaved", 4, 96, 17, scale_of_heads=True),
    "no norm": Case(None, "interleaved", 2, 64, 40),
    "no rotary": Case("head", None, 2, 64, 40),
    "tables of batch rows": Case("head", "interleaved", 2, 128, 20, tables=2),
    "bfloat16": Case("across", "interleaved", 2, 128, 100, True, dtype="bfloat16"),
    "several blocks": Case("across", "interleaved", 40, 128, 200, scale_of_heads=True),
}
MANY = "half in one register", "bfloat16"


@pytest.mark.parametrize("name", but(CASES, MANY))
def test_forward_and_gradients(name: str) -> None:
    case = CASES[name]
    work, (x, vectors, tables), dy = _operands(case)
    assert why_not(work) == ""
    how = NormRope(work, interpret=True)
    found = _with_gradients(partial(on_shard, how), (x, vectors, tables), dy)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: np.asarray(a, np.float64), ((x, vectors, tables), dy))
        exact = _with_gradients(partial(_exact, work), *wide)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        digits = 2e-5 if got.dtype == jnp.float32 else 1e-2
        error = np.abs(np.asarray(got, np.float64) - np.asarray(want)).max()
        assert error < digits * max(1.0, np.abs(want).max()), got.shape


@pytest.mark.slow
def test_a_derivative_of_the_gradient() -> None:
    """XLA's steps compute the tangent of a gradient."""
    work, (x, vectors, tables), dy = _operands(CASES["flux"])

    def gradient(compute: Any, x: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(dy * jnp.sin(compute(x, vectors, tables))))(x)

    found, want = (
        jax.jvp(partial(gradient, compute), (x,), (dy,))[1]
        for compute in (partial(on_shard, NormRope(work, interpret=True)), partial(in_steps, work))
    )
    assert np.allclose(found, want, atol=1e-4)


def test_ranks_are_not_promoted() -> None:
    work, operands, dy = _operands(CASES["wan"])
    with jax.numpy_rank_promotion("raise"):
        for compute in (partial(on_shard, NormRope(work, interpret=True)), partial(in_steps, work)):
            jax.eval_shape(lambda *of, f=compute: jax.vjp(f, *of)[1](dy), *operands)


def test_where_it_runs() -> None:
    def decided(heads: int, head_dim: int, norm: str = "rms_norm", **how: Any) -> NormRope:
        sizes: dict[str, Any] = {"heads": heads, "dim_head": head_dim, "qk_norm": norm}
        layer = nnx.eval_shape(lambda: ma.FlaxAttention(64, **sizes, rngs=nnx.Rngs(0)))
        x = jax.ShapeDtypeStruct((1, 8, 64), jnp.bfloat16)
        given = {"rotary": ma.rope_1d(head_dim, 8)} | how
        return decide(V6E, x, norm, layer.norm_q, heads=heads, head_dim=head_dim, **given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "device_count", lambda: 1)
        found = decided(40, 128, "rms_norm_across_heads")
        assert found.work is not None
        assert found.note == "norm, rotary embedding and transpose of the heads in one kernel"
        assert "cannot take 5 heads of dim 80" in decided(5, 80).reason
        assert decided(8, 80).work is not None
        assert "needs an RMS norm" in decided(2, 128, "layer_norm").note
        assert decided(2, 128, rotary=None) == NormRope()
    assert "the module has no mesh=" in decided(2, 128).reason


def _operands(case: Case) -> tuple[RowWork, Any, Any]:
    rng = np.random.default_rng(3)
    n, h, t = case.heads, case.head_dim, case.length

    def normal(*shape: int, dtype: str = "float32") -> Any:
        return jnp.asarray(rng.normal(size=shape), dtype)

    x, dy = (normal(2, t, n, h, dtype=case.dtype) for _ in range(2))
    vectors = {"bias": normal(n, h)}
    if case.norm is not None:
        vectors["scale"] = normal(n if case.scale_of_heads else 1, h)
    angles = rng.normal(size=(case.tables, t, h // 2))
    tables = tuple(jnp.asarray(f(angles), "float32") for f in (np.cos, np.sin))
    work = RowWork(n, h, case.norm, 1e-6, case.style)
    return work, (x, vectors, tables if case.style else ()), dy


def _with_gradients(compute: Any, operands: Any, dy: Any) -> Any:
    def both(operands: Any, dy: Any) -> Any:
        y, vjp = jax.vjp(compute, *operands)
        return y, vjp(dy)

    return jax.jit(both)(operands, dy)


def _exact(work: RowWork, x: Any, vectors: Any, tables: Any) -> Any:
    """Compute the steps in the dtype of x."""
    z = x + vectors["bias"]
    if work.norm is not None:
        axes = (2, 3) if work.norm == "across" else (3,)
        z = z / jnp.sqrt((z * z).mean(axes, keepdims=True) + work.eps) * vectors["scale"]
    if work.style is None:
        return z
    cos, sin = (a[:, :, None] for a in tables)
    pairs = z.reshape(*z.shape[:3], -1, 2) if work.style == "interleaved" else None
    a, b = (pairs[..., 0], pairs[..., 1]) if pairs is not None else jnp.split(z, 2, axis=3)
    first, second = a * cos - b * sin, a * sin + b * cos
    if work.style == "half":
        return jnp.concatenate([first, second], axis=3)
    return jnp.stack([first, second], axis=4).reshape(z.shape)
