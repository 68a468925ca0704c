"""Ulysses: the exchanged arrays, the number of groups, and refusals."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import Unsupported
from tests.reference import attention64


def config(strategy: str, context: int = 8, **more) -> ma.AttentionConfig:
    sizes = {"ici_data_parallelism": 8 // context, "ici_context_parallelism": context}
    return ma.AttentionConfig(attention=strategy, attention_kernel="dot_product", **sizes, **more)


def qkv(
    batch: int = 1, length: int = 64, heads: int = 16, kv_heads: int = 16
) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(
        jax.random.normal(key, (batch, length, n, 8))
        for key, n in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    )


REFUSED = {
    "fewer heads fit": (6, 4, {"context": 8}, "6 query heads must be a multiple of 4", "shards: 2"),
    "no heads fit": (7, 4, {"context": 8}, "7 query heads must be a multiple of 4", ": ring"),
    "shards": (16, 4, {"context": 6}, "must divide the size of the context axis, 6", "1, 2, 3"),
    "tensor": (12, 4, {"context": 8, "tensor": 2}, "the tensor axis of 2", "ulysses_shards: 2"),
    "tensor 12": (12, 4, {"context": 12, "tensor": 2}, "the tensor axis of 2", "2 or 3 or 6"),
}


def planned(heads: int, shards: int, mesh: dict[str, int]) -> ma.Plan:
    asked = ma.AttentionConfig(
        attention="ulysses_ring", attention_kernel="dot_product", ulysses_shards=shards
    )
    return ma.plan(ma.Call.of(*qkv(heads=heads, kv_heads=heads)[:2]), asked, mesh)


def test_a_bias_in_64_bit_mode() -> None:
    """Slice starts are int32 and Python integers; the latter are int64 in this mode."""
    cfg, x = config("ulysses_ring", context=4, ulysses_shards=2), qkv(2, 12, 4, 4)
    bias = np.random.default_rng(1).normal(size=(1, 4, 12, 12)).astype(np.float32)
    with jax.enable_x64(True):
        attend = partial(ma.attention, config=cfg, mesh=cfg.make_mesh())
        got = jax.jit(jax.grad(lambda *x: attend(*x[:3], bias=x[3]).sum(), (0, 1, 2, 3)))(*x, bias)
    want = attention64(*x, bias=bias, dout=np.ones((2, 12, 4, 8)))
    for g, w in zip(got, want[2:], strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, w, atol=2e-5)


@pytest.mark.parametrize("name", REFUSED)
def test_groups_that_do_not_divide_are_refused(name: str) -> None:
    heads, shards, mesh, rule, remedy = REFUSED[name]
    with pytest.raises(Unsupported) as caught:
        planned(heads, shards, mesh)
    assert rule in caught.value.rule and remedy in caught.value.remedy


@pytest.mark.parametrize("shards", [2, 3, 6])
def test_groups_that_a_refusal_names_fit(shards: int) -> None:
    """With 12 heads, each of two tensor shards has six."""
    plan = planned(12, shards, {"context": 12, "tensor": 2})
    assert f"{12 // shards} groups of {shards}" in plan.explain()


@pytest.mark.slow
@pytest.mark.parametrize("axes", [(0, 0, 0), (2, 2, 2), (0, None, 1)], ids=str)
def test_vmap_over_groups(axes: tuple[int | None, ...]) -> None:
    """Two maps, one in the other: each moves its axis to the front of what is exchanged."""
    cfg = config("ulysses_ring", ulysses_shards=2)
    rng, alone = np.random.default_rng(0), partial(ma.attention, mask=M.Causal())
    shapes = ((2, 16, 4, 8) if a is None else np.insert((2, 16, 4, 8), a, 2) for a in axes)
    given = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]

    def loss(attend: Any, *given: Any) -> Any:
        inner = jax.vmap(lambda *x: attend(*(y[None] for y in x))[0])
        out = jax.vmap(inner, axes)(*given)
        return (out**2).sum(), out

    got, want = (
        jax.jit(jax.value_and_grad(partial(loss, f), (0, 1, 2), has_aux=True))(*given)
        for f in (partial(alone, config=cfg, mesh=cfg.make_mesh()), alone)
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), got, want)


def test_vmap_of_a_gradient_where_the_mask_hides_every_key() -> None:
    """On a mesh the result does not depend on the operands, but its tangent does."""
    config = ma.AttentionConfig(attention="dot_product", ici_context_parallelism=2)
    mesh = config.make_mesh(jax.devices()[:2])
    x = jnp.ones((3, 1, 2, 4, 8))

    def out(x: jax.Array) -> jax.Array:
        return ma.attention(x, x, x, mask=ma.masks.KeyLimit(0), config=config, mesh=mesh)

    found, pull = jax.vjp(jax.vmap(out), x)
    assert found.shape == x.shape and not np.any(found) and not np.any(pull(found)[0])
