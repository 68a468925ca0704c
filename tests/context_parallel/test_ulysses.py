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
from tests.jaxprs import count_primitive
from tests.reference import attention64
from tests.waiting import but


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


CASES = {
    "ulysses": (config("ulysses"), 1),
    "ulysses, 2 groups of heads": (config("ulysses", ulysses_attention_chunks=2), 1),
    "ulysses, more groups asked": (config("ulysses", ulysses_attention_chunks=5), 1),
    "2 x 4": (config("ulysses_ring", ulysses_shards=4), 1),
    "4 x 2": (config("ulysses_ring", ulysses_shards=2), 1),
    "4 x 2, 2 groups of heads": (
        config("ulysses_ring", ulysses_shards=2, ulysses_attention_chunks=2), 1,
    ),
    "8 x 1, a plain ring": (config("ulysses_ring", ulysses_shards=1), 1),
    "2 x 2 beside data": (config("ulysses_ring", context=4, ulysses_shards=2), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_plan_names_every_transfer(name: str) -> None:
    cfg, batch = CASES[name]
    mesh, x = cfg.make_mesh(), qkv(batch)
    plan = ma.plan(ma.Call.of(x[0], x[1]), cfg, mesh)

    def train(*x):
        return jax.value_and_grad(
            lambda *x: (ma.attention(*x, config=cfg, mesh=mesh) ** 2).sum(), (0, 1, 2)
        )(*x)

    jaxpr = jax.make_jaxpr(train)(*x).jaxpr
    named = {"all_to_all": 0, "ppermute": 0}
    for c in plan.collectives:
        named[c.kind] += c.hops * c.arrays
    assert {kind: count_primitive(jaxpr, kind) for kind in named} == named
    assert count_primitive(jaxpr, "all_gather") == count_primitive(jaxpr, "psum") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", but(CASES, ["4 x 2, 2 groups of heads"]))
def test_masks_with_heads_and_a_full_bias(name: str) -> None:
    """Each device has some heads and queries, and must slice a table and a bias to match."""
    cfg, batch = CASES[name]
    q, k, v = qkv(batch, length=37, kv_heads=4)
    rng = np.random.default_rng(0)
    table = rng.random((batch, 16, 37, 37)) < 0.6
    bias = jnp.asarray(rng.normal(size=(batch, 16, 37, 37)), jnp.float32)
    mesh = cfg.make_mesh()

    def run(q, k, v, bias):
        return ma.attention(
            q, k, v, mask=M.Dense(table) & M.Causal(), bias=bias, config=cfg, mesh=mesh
        )

    @jax.jit
    def both(*operands):
        out, vjp = jax.vjp(run, *operands)
        return out, *vjp(jnp.ones_like(out))

    want = attention64(q, k, v, table & np.tri(37, dtype=bool), bias, dout=np.ones(q.shape))
    for got, expected in zip(both(q, k, v, bias), (want.out, *want[2:]), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


REFUSED = {
    "fewer heads fit": (6, 4, {"context": 8}, "6 query heads must be a multiple of 4", "shards: 2"),
    "no heads fit": (7, 4, {"context": 8}, "7 query heads must be a multiple of 4", ": ring"),
    "shards": (
        16,
        4,
        {"context": 6},
        "ulysses_shards=4 must divide the size of the context axis, 6",
        "1, 2, 3",
    ),
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
    (cfg, _), x = CASES["2 x 2 beside data"], qkv(2, 12, 4, 4)
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
@pytest.mark.parametrize("axes", but([0, 2, [0, None, 1]], [0]), ids=str)
def test_vmap_over_groups(axes: Any) -> None:
    """Two nested vmaps: each moves its axis to the front of the exchanged arrays."""
    cfg = config("ulysses_ring", ulysses_shards=2)
    mesh, rng = cfg.make_mesh(), np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, 16, 4, 8)), jnp.float32) for _ in range(3)]
    outer = tuple(axes) if isinstance(axes, list) else (axes,) * 3
    shaped = [jnp.expand_dims(x, 0) for x in arrays]
    given = [
        x[0] if axis is None else jnp.moveaxis(jnp.concatenate([x, -x]), 0, axis)
        for x, axis in zip(shaped, outer, strict=True)
    ]

    def loss(attend: Any, *given: Any) -> Any:
        inner = jax.vmap(lambda *x: attend(*(y[None] for y in x))[0])
        out = jax.vmap(inner, outer)(*given)
        return (out**2).sum(), out

    alone = partial(ma.attention, mask=M.Causal())
    ours = partial(alone, config=cfg, mesh=mesh)
    got, want = (
        jax.jit(jax.value_and_grad(partial(loss, f), (0, 1, 2), has_aux=True))(*given)
        for f in (ours, alone)
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
