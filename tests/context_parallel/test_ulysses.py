"""Ulysses: what is exchanged, in how many groups, and what cannot be."""

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
    "ulysses, more groups asked than heads allow": (
        config("ulysses", ulysses_attention_chunks=5),
        1,
    ),
    "2 x 4": (config("ulysses_ring", ulysses_shards=4), 1),
    "4 x 2": (config("ulysses_ring", ulysses_shards=2), 1),
    "4 x 2 in 2 groups of heads": (
        config("ulysses_ring", ulysses_shards=2, ulysses_attention_chunks=2),
        1,
    ),
    "8 x 1, a plain ring": (config("ulysses_ring", ulysses_shards=1), 1),
    "2 x 2 beside data": (config("ulysses_ring", context=4, ulysses_shards=2), 2),
}


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


# The groups of heads stand inside the groups of devices; a plain ring has its own tests.
LONGER = (
    "4 x 2",
    "2 x 4",
    "2 x 2 beside data",
    "8 x 1, a plain ring",
    "ulysses, more groups asked than heads allow",
)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in LONGER else n for n in CASES]
)
def test_masks_with_heads_and_a_full_bias(name: str) -> None:
    """Each device attends with some heads over some queries: it must take that part of a table and
    of a bias.
    """
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


def test_groups_that_do_not_divide_are_refused() -> None:
    cfg = config("ulysses_ring", ulysses_shards=4)
    q, k, _ = qkv(heads=6, kv_heads=6)
    named = (
        r"6 heads must be a multiple of 4.*\n.*take ulysses_ring with ulysses_shards: 2, or ring"
    )
    with pytest.raises(Unsupported, match=named):
        ma.plan(ma.Call.of(q, k), cfg, {"context": 8})
    assert ma.plan(ma.Call.of(q, k), config("ulysses_ring", ulysses_shards=2), {"context": 8})
    q, k, _ = qkv(heads=7, kv_heads=7)
    with pytest.raises(Unsupported, match=r"7 heads must be a multiple of 4.*\n.*take ring in its"):
        ma.plan(ma.Call.of(q, k), cfg, {"context": 8})
    with pytest.raises(
        Unsupported, match=r"ulysses_shards=4 must divide the context axis, 6\n.*1, 2, 3, 6"
    ):
        ma.plan(ma.Call.of(*qkv()[:2]), config("ulysses_ring", ulysses_shards=4), {"context": 6})


@pytest.mark.parametrize(("context", "fits"), [(8, "2"), (12, "2 or 3 or 6")])
def test_groups_that_are_named_fit_beside_tensor_shards(context: int, fits: str) -> None:
    """Of 12 heads each of two tensor shards has six."""
    (q, k, _), mesh = qkv(heads=12, kv_heads=12), {"context": context, "tensor": 2}

    def planned(shards: int) -> ma.Plan:
        asked = ma.AttentionConfig(
            attention="ulysses_ring", attention_kernel="dot_product", ulysses_shards=shards
        )
        return ma.plan(ma.Call.of(q, k), asked, mesh)

    refusal = rf"multiple of 8 \(exchanging 4 x tensor 2\)\n.*ulysses_shards: {fits}, or ring"
    with pytest.raises(Unsupported, match=refusal):
        planned(4)
    for shards in map(int, fits.split(" or ")):
        assert planned(shards).strategy.name == "ulysses_ring"


def test_groups_on_a_mesh_of_the_users_own() -> None:
    cfg = ma.AttentionConfig(
        attention="dot_product", context_parallel="ulysses_ring", ulysses_shards=2
    )
    mesh = config("ulysses_ring").make_mesh()
    q, k, v = qkv()
    assert "4 groups of 2" in ma.plan(ma.Call.of(q, k), cfg, mesh).explain()
    got = ma.attention(q, k, v, config=cfg, mesh=mesh)
    np.testing.assert_allclose(got, ma.attention(q, k, v), atol=2e-6)


@pytest.mark.parametrize(
    "axes", [0, *(pytest.param(x, marks=pytest.mark.slow) for x in (2, (0, None, 1)))], ids=str
)
def test_vmap_over_groups(axes: Any) -> None:
    """Two maps, one in the other: each moves its axis to the front of what is exchanged."""
    cfg = config("ulysses_ring", ulysses_shards=2)
    mesh, rng = cfg.make_mesh(), np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=(2, 16, 4, 8)), jnp.float32) for _ in range(3)]
    outer = axes if isinstance(axes, tuple) else (axes,) * 3
    shaped = [jnp.expand_dims(x, 0) for x in arrays]
    given = [
        x[0] if axis is None else jnp.moveaxis(jnp.concatenate([x, -x]), 0, axis)
        for x, axis in zip(shaped, outer, strict=True)
    ]

    def loss(attend: Any, *given: Any) -> Any:
        inner = jax.vmap(lambda *x: attend(*(y[None] for y in x))[0])
        out = jax.vmap(inner, outer)(*given)
        return (out**2).sum(), out

    def ours(q: Any, k: Any, v: Any) -> Any:
        return ma.attention(q, k, v, mask=M.Causal(), config=cfg, mesh=mesh)

    def alone(q: Any, k: Any, v: Any) -> Any:
        return ma.attention(q, k, v, mask=M.Causal())

    got, want = (
        jax.jit(jax.value_and_grad(partial(loss, f), (0, 1, 2), has_aux=True))(*given)
        for f in (ours, alone)
    )
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-4, rtol=1e-4), got, want)
