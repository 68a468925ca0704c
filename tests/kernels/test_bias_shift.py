"""Rows of a bias far from 0, as padding written as -1e9: the softmax, its gradients and a ring's
sums stay right.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import masks as M
from tests.reference import attention64, error

B, T, S, N, H = 2, 10, 12, 4, 8


def _padding() -> np.ndarray:
    bias = np.zeros((B, 1, 1, S))
    bias[0, ..., 5:], bias[1] = -1e9, -1e9
    return bias


BIASES = {
    "an example that is all padding": _padding(),
    "all keys alike": np.full((1, 1, 1, S), -1e9),
    "far above 0": np.full((B, N, T, S), 1e9),
    "rows of their own": np.full((B, 1, T, S), -1e7) + np.arange(S) * 1.0,
    "one number a query": np.linspace(-1e8, 1e8, T).reshape(1, 1, T, 1),
    "below the limit": np.full((1, 1, 1, S), -4e3),
    "some keys hidden": np.where(np.arange(S) % 3, -1e9, -np.inf).reshape(1, 1, 1, S),
}
CONFIGS = {
    "dense": {"attention": "dot_product"},
    "blockwise": {
        "attention": "dot_product",
        "use_memory_efficient_attention": True,
        "query_chunk_size": 4,
        "key_chunk_size": 4,
    },
    "ring": {"attention": "ring", "attention_kernel": "dot_product", "ici_context_parallelism": 4},
    "all_gather": {
        "attention": "dot_product",
        "context_parallel": "all_gather",
        "ici_context_parallelism": 2,
    },
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("bias", BIASES)
def test_against_float64(bias: str, config: str) -> None:
    rng = np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(B, n, N, H)), jnp.float32) for n in (T, S, S, T))
    b, dlse = (
        jnp.asarray(BIASES[bias], jnp.float32),
        jnp.asarray(rng.normal(size=(B, N, T)), jnp.float32),
    )
    chosen = ma.AttentionConfig(**CONFIGS[config])
    devices = chosen.ici_context_parallelism
    mesh = chosen.make_mesh(jax.devices()[:devices]) if devices > 1 else None

    def f(*x):
        return ma.attention(*x[:3], bias=x[3], config=chosen, mesh=mesh, return_lse=True)

    (out, lse), pull = jax.vjp(f, q, k, v, b)
    want = attention64(q, k, v, bias=np.asarray(b, np.float64), dout=dout, dlse=dlse)
    names, wanted = (
        ("out", "lse", "dq", "dk", "dv"),
        (want.out, want.lse, want.dq, want.dk, want.dv),
    )
    got = (out, lse, *pull((dout, dlse))[:3])
    errors = {n: error(g, w) for n, g, w in zip(names, got, wanted, strict=True)}
    assert max(errors.values()) < 2e-5, errors


HIDDEN = {
    "far above 0": np.where(np.arange(S) < 8, 0.0, 1e9),
    "a little above": np.where(np.arange(S) < 8, 0.0, 1e5),
    "far below 0": np.where(np.arange(S) < 8, 0.0, -1e9),
    "the largest there is": np.where(np.arange(S) < 8, 0.0, 3e38),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("hidden", HIDDEN)
def test_what_hidden_keys_have_says_nothing(hidden: str, config: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(B, n, N, H)), jnp.float32) for n in (T, S, S, T))
    own = rng.normal(size=(1, N, T, S))
    chosen = ma.AttentionConfig(**CONFIGS[config])
    devices = chosen.ici_context_parallelism
    mesh = chosen.make_mesh(jax.devices()[:devices]) if devices > 1 else None
    mask, allowed = M.KeyPadding(np.array([8, 8])), np.broadcast_to(np.arange(S) < 8, (B, N, T, S))

    def f(q, k, v):
        return ma.attention(
            q, k, v, mask, jnp.asarray(own + HIDDEN[hidden], jnp.float32), config=chosen, mesh=mesh
        )

    out, pull = jax.vjp(f, q, k, v)
    want = attention64(q, k, v, allowed, bias=own, dout=dout)
    wanted = (want.out, want.dq, want.dk, want.dv)
    assert max(error(g, w) for g, w in zip((out, *pull(dout)), wanted, strict=True)) < 2e-5


@pytest.mark.parametrize("config", ["dense", "blockwise", "all_gather"])
@pytest.mark.parametrize("size", [-1e9, -1e5, -1e3, 3.4e38])
def test_gradients_are_those_of_the_forward_where_a_mask_hides_the_keys_without_bias(
    size: float, config: str
) -> None:
    """Padding on the left of a causal call: to its queries no key is visible that has no bias."""
    rng = np.random.default_rng(2)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(B, S, N, H)), jnp.float32) for _ in range(4))
    bias = jnp.where(jnp.arange(S) < 7, size, 0.0).astype(jnp.float32).reshape(1, 1, 1, S)
    chosen = ma.AttentionConfig(**CONFIGS[config])
    devices = chosen.ici_context_parallelism
    mesh = chosen.make_mesh(jax.devices()[:devices]) if devices > 1 else None
    out, pull = jax.vjp(
        lambda *x: ma.attention(*x, mask=M.Causal(), bias=bias, config=chosen, mesh=mesh), q, k, v
    )
    theirs, their_pull = jax.vjp(
        lambda *x: jax.nn.dot_product_attention(
            *x, bias=jnp.broadcast_to(bias, (1, 1, S, S)), is_causal=True
        ),
        q,
        k,
        v,
    )
    for got, want in zip((out, *pull(dout)), (theirs, *their_pull(dout)), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-4 * float(jnp.abs(want).max()))


def test_a_text_that_is_all_padding_teaches_as_any_other() -> None:
    """Every key of the row has the same bias: it says nothing, and neither do the gradients of the
    weights.
    """
    module = ma.CrossAttention(32, 24, heads=4, dim_head=8, rngs=nnx.Rngs(0))
    x, text = (
        jax.random.normal(jax.random.key(i), shape)
        for i, shape in enumerate([(1, 6, 32), (1, 16, 24)])
    )

    def loss(module, bias):
        return (module(x, text, bias=bias) ** 2).sum()

    far, none = (
        nnx.grad(loss)(module, bias)
        for bias in (jnp.full((1, 1, 1, 16), -1e9), jnp.zeros((1, 1, 1, 16)))
    )
    for a, b in zip(jax.tree.leaves(far), jax.tree.leaves(none), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
