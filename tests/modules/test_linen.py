"""In Flax Linen: maxattn's modules through the bridge, Linen's own attention, weights both ways."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import maxattn as ma
from tests.reference import attention64

CONFIGS = {
    "dense": ma.AttentionConfig(attention="dot_product"),
    "blockwise": ma.AttentionConfig(
        use_memory_efficient_attention=True, query_chunk_size=16, key_chunk_size=16
    ),
}
SHAPE = {"query_dim": 32, "heads": 4, "kv_heads": 2, "dim_head": 8}
SIZES: dict[str, Any] = SHAPE | {"qk_norm": "rms_norm"}
X = jax.random.normal(jax.random.key(0), (2, 37, 32))
MASK = ma.masks.LocalWindow(5, 2)


def updated(layer: nnx.Module, params: Any) -> Any:
    """Put Linen's parameters into a module."""
    state = nnx.state(layer, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(layer, state)
    return layer


def pure(layer: nnx.Module) -> Any:
    return nnx.to_pure_dict(nnx.state(layer, nnx.Param))


def same(left: Any, right: Any, **tolerance: float) -> None:
    """Compare two trees of equal keys."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


# ---- maxattn's modules in Linen ------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_a_bridged_module_is_the_module(name):
    bridged = nnx.bridge.to_linen(ma.FlaxAttention, **SIZES, config=CONFIGS[name])
    params = nn.unbox(bridged.init(jax.random.key(1), X))["params"]
    layer = updated(ma.FlaxAttention(**SIZES, config=CONFIGS[name], rngs=nnx.Rngs(7)), params)
    rotary = ma.rope_1d(8, length=37)

    def linen_loss(params: Any) -> jax.Array:
        out: Any = bridged.apply({"params": params}, X, rotary_emb=rotary, mask=MASK)
        return (out**2).sum()

    def nnx_loss(layer: Any) -> jax.Array:
        return (layer(X, rotary_emb=rotary, mask=MASK) ** 2).sum()

    value, gradients = jax.jit(jax.value_and_grad(linen_loss))(params)
    wanted, wanted_gradients = nnx.jit(nnx.value_and_grad(nnx_loss))(layer)
    assert float(value) == pytest.approx(float(wanted), rel=1e-6)
    same(gradients, nnx.to_pure_dict(wanted_gradients), rtol=1e-5, atol=1e-5)


def test_a_bridged_module_in_a_linen_block_drops_with_a_stream():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, deterministic: bool = True) -> jax.Array:
            attn = nnx.bridge.to_linen(ma.FlaxAttention, **SIZES, dropout=0.5, name="attn")
            key = None if deterministic else self.make_rng("dropout")
            return x + attn(x, deterministic=deterministic, rngs=key)

    variables = Block().init(jax.random.key(0), X)
    kept: Any = Block().apply(variables, X)
    outs: list[Any] = [
        Block().apply(variables, X, False, rngs={"dropout": jax.random.key(n)}) for n in (1, 1, 2)
    ]
    dropped, again, other = outs
    assert np.array_equal(dropped, again) and not np.array_equal(dropped, other)
    zeros = np.mean(np.asarray(dropped - X) == 0.0)
    assert 0.4 < zeros < 0.6 and not np.any(np.asarray(kept - X) == 0.0)


def test_weights_go_to_nnx_and_back_bit_for_bit():
    bridged = nnx.bridge.to_linen(ma.CrossAttention, **SIZES, cross_attention_dim=24)
    text = jnp.ones((2, 9, 24))
    params = nn.unbox(bridged.init(jax.random.key(3), X, text))["params"]
    layer = updated(ma.CrossAttention(**SIZES, cross_attention_dim=24, rngs=nnx.Rngs(0)), params)
    back = pure(layer)
    assert jax.tree.all(jax.tree.map(np.array_equal, back, params))
    out = bridged.apply({"params": back}, X, text)
    np.testing.assert_array_equal(out, layer(X, text))


# ---- Linen's attention over maxattn --------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_linen_s_attention_over_maxattn_is_linen_s(name):
    theirs = nn.MultiHeadDotProductAttention(num_heads=4)
    ours = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=ma.attention_fn(CONFIGS[name]))
    variables = theirs.init(jax.random.key(0), X)
    mask = nn.make_causal_mask(jnp.ones((2, 37)))

    def loss(module: Any) -> Any:
        return jax.value_and_grad(lambda v, x: (module.apply(v, x, mask=mask) ** 2).sum(), (0, 1))

    value, gradients = loss(ours)(variables, X)
    wanted, wanted_gradients = loss(theirs)(variables, X)
    assert float(value) == pytest.approx(float(wanted), rel=1e-5)
    same(gradients, wanted_gradients, rtol=1e-4, atol=1e-4)


def test_what_linen_hands_over_is_attended_to_as_in_float64():
    keys = jax.random.split(jax.random.key(1), 4)
    q, k, v, dout = (jax.random.normal(key, (2, 37, 4, 8)) for key in keys)
    table = nn.make_causal_mask(jnp.ones((2, 37)))
    attend = ma.attention_fn(CONFIGS["blockwise"])
    out, back = jax.vjp(lambda *qkv: attend(*qkv, mask=table), q, k, v)
    wanted = attention64(q, k, v, allowed=table != 0, dout=dout)
    for ours, theirs in zip((out, *back(dout)), (wanted.out, *wanted[2:5]), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)


def test_dropout_of_linen_s_attention_is_refused_and_off_when_deterministic():
    fn = ma.attention_fn(CONFIGS["dense"])
    mha = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=fn, dropout_rate=0.1)
    variables = mha.init(jax.random.key(0), X, deterministic=True)
    with pytest.raises(NotImplementedError, match="no kernel of maxattn drops"):
        mha.apply(variables, X, deterministic=False, rngs={"dropout": jax.random.key(1)})
    kept: Any = mha.apply(variables, X, deterministic=True)
    assert kept.shape == X.shape


def test_linen_s_weights_are_those_of_nnx_s_attention():
    mha = nn.MultiHeadDotProductAttention(num_heads=4)
    params = mha.init(jax.random.key(0), X)["params"]
    twin = nnx.MultiHeadAttention(
        4, 32, decode=False, rngs=nnx.Rngs(0), attention_fn=ma.attention_fn(CONFIGS["dense"])
    )
    out = updated(twin, params)(X)
    np.testing.assert_allclose(out, mha.apply({"params": params}, X), atol=1e-5)
    assert jax.tree.all(jax.tree.map(np.array_equal, pure(twin), params))
