"""Operands other than jax's arrays, and the derivatives that attention supports."""

from __future__ import annotations

from functools import cache, partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import masks as M
from tests.waiting import but

CHUNKED = ma.AttentionConfig(attention="dot_product", use_memory_efficient_attention=True)
CONFIGS = {
    "dot_product": ma.AttentionConfig(attention="dot_product"),
    "memory_efficient": CHUNKED,
    "flash": ma.AttentionConfig(attention="flash"),
}


@pytest.mark.parametrize("which", ["q", "k", "v", "bias", "all"])
@pytest.mark.parametrize("kernel", CONFIGS)
def test_variables_and_numpy_are_operands(which: str, kernel: str) -> None:
    """A learned query may be passed as `nnx.Param`, beside numpy arrays."""
    config = CONFIGS[kernel]
    arrays = dict(zip("qkv", np.random.default_rng(0).normal(size=(3, 1, 9, 2, 8)), strict=True))
    arrays = {name: x.astype(np.float32) for name, x in arrays.items()}
    if kernel != "flash":
        arrays["bias"] = np.linspace(-1, 1, 9, dtype=np.float32).reshape(1, 1, 1, 9)
    given = {n: nnx.Param(jnp.asarray(x)) if which in (n, "all") else x for n, x in arrays.items()}
    want = ma.attention(**{n: jnp.asarray(x) for n, x in arrays.items()}, config=config)
    np.testing.assert_array_equal(ma.attention(**given, config=config), want)


def test_gradients_reach_a_variable() -> None:
    queries, keys = jax.random.normal(jax.random.key(0), (2, 1, 6, 2, 8))
    model = nnx.Dict(q=nnx.Param(queries))
    got = nnx.grad(lambda m: (ma.attention(m.q, keys, keys) ** 2).sum())(model)
    want = jax.grad(lambda q: (ma.attention(q, keys, keys) ** 2).sum())(queries)
    np.testing.assert_allclose(got.q[...], want, atol=1e-6)


# Hops and exchanges of heads at once.
STRATEGIES = ["none", "ring", "ulysses_ring", "ulysses", "all_gather"]


@pytest.mark.parametrize("strategy", but(STRATEGIES, ["none", "ulysses_ring"]))
def test_dense_has_second_derivatives(strategy: str) -> None:
    spread: dict[str, Any] = {"context_parallel": strategy, "ici_context_parallelism": 4}
    spread = {} if strategy == "none" else spread
    if strategy == "ulysses_ring":
        spread["ulysses_shards"] = 2
    config = ma.AttentionConfig(attention="dot_product", **spread)
    mesh = config.make_mesh(jax.devices()[:4]) if spread else None
    attend = partial(ma.attention, mask=M.Causal(), config=config, mesh=mesh)
    for ours, want in zip(second_derivatives(attend), of_plain_softmax(), strict=True):
        np.testing.assert_allclose(ours, want, atol=3e-4, rtol=1e-4)


def second_derivatives(attend: Any) -> Any:
    """Differentiate forward over reverse, and reverse over reverse, by q and k."""
    x = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        slope = jax.grad(lambda q, k: (attend(q, k, v) ** 2).sum())
        _, over_reverse = jax.jvp(lambda q: slope(q, k), (q,), (k,))
        return over_reverse, *jax.grad(lambda q, k: (slope(q, k) ** 2).sum(), (0, 1))(q, k)

    return both(*x)


@cache
def of_plain_softmax() -> Any:
    def plain(q: Any, k: Any, v: Any) -> Any:
        s = jnp.einsum("btnh,bsnh->bnts", q, k) * 8**-0.5
        s = jnp.where(jnp.tri(16, dtype=bool), s, -jnp.inf)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s), v)

    return second_derivatives(plain)


# A mapped key makes the LSE mapped, as a mapped query does; a mapped value, which no LSE needs,
# meets the dense kernel.
MAPPED = [("dot_product", "v"), *product(CONFIGS, ["q", "bias"])]


@pytest.mark.parametrize(
    ("kernel", "mapped"), but(product(CONFIGS, ["q", "k", "v", "kv", "bias"]), MAPPED)
)
def test_vmap_gives_what_is_shared_its_own_gradient(kernel: str, mapped: str) -> None:
    """If only v is mapped the LSE is not, and jax would count its gradient for each example."""
    config = CONFIGS[kernel]
    arrays = dict(zip("qkv", jax.random.normal(jax.random.key(0), (3, 1, 6, 2, 8)), strict=True))
    if kernel != "flash":
        arrays["bias"] = jax.random.normal(jax.random.key(1), (1, 2, 6, 6))
    names = {"bias"} & {mapped} if mapped == "bias" else set(mapped)
    many = {n: jnp.stack([x, 2 * x, -x]) for n, x in arrays.items() if n in names}
    shared = {n: x for n, x in arrays.items() if n not in names}

    def one(shared: Any, given: Any) -> Any:
        out, lse = ma.attention(**shared, **given, config=config, return_lse=True)
        return (out**2).sum() + (lse * jnp.arange(12.0).reshape(2, 6)).sum()

    def at_once(shared: Any) -> Any:
        return jax.vmap(lambda given: one(shared, given), axis_size=3)(many).sum()

    def in_turn(shared: Any) -> Any:
        return jax.lax.scan(lambda _, given: (None, one(shared, given)), None, many, 3)[1].sum()

    got, want = jax.jit(lambda x: (jax.grad(at_once)(x), jax.grad(in_turn)(x)))(shared)
    for name in shared:
        np.testing.assert_allclose(got[name], want[name], atol=1e-4, rtol=1e-4)
