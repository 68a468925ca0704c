"""Flax Linen: maxattn's modules through the bridge, Linen's own attention, weights both ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

import maxattn as ma
from tests.modules.reference import compiled

CHUNKS = ma.AttentionConfig(
    use_memory_efficient_attention=True, query_chunk_size=16, key_chunk_size=16
)
SIZES: dict[str, Any] = {
    "query_dim": 32, "heads": 4, "kv_heads": 2, "dim_head": 8, "qk_norm": "rms_norm",
}  # fmt: skip
X = jax.random.normal(jax.random.key(0), (2, 37, 32))
MASK = ma.masks.LocalWindow(5, 2)


def updated(layer: nnx.Module, params: Any) -> Any:
    """Copy Linen's parameters into a module."""
    state = nnx.state(layer, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(layer, state)
    return layer


def same(left: Any, right: Any, **tolerance: float) -> None:
    """Compare two trees of equal keys."""
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


# ---- maxattn's modules in Linen ------------------------------------------------------------------


def test_a_bridged_module_is_the_module():
    bridged = nnx.bridge.to_linen(ma.FlaxAttention, **SIZES, config=CHUNKS)
    params = nn.unbox(bridged.init(jax.random.key(1), X))["params"]
    layer = updated(ma.FlaxAttention(**SIZES, config=CHUNKS, rngs=nnx.Rngs(7)), params)
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
    back = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
    assert jax.tree.all(jax.tree.map(np.array_equal, back, params))
    np.testing.assert_array_equal(bridged.apply({"params": back}, X, text), layer(X, text))


# ---- Linen's attention over maxattn --------------------------------------------------------------


def test_linen_s_attention_over_maxattn_is_linen_s():
    """So is NNX's with Linen's weights."""
    theirs = nn.MultiHeadDotProductAttention(num_heads=4)
    ours = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=ma.attention_fn(CHUNKS))
    variables = theirs.init(jax.random.key(0), X)
    mask = nn.make_causal_mask(jnp.ones((2, 37)))

    def loss(module: Any) -> Any:
        def run(v: Any, x: jax.Array) -> Any:
            out = module.apply(v, x, mask=mask)
            return (out**2).sum(), out

        return jax.jit(jax.value_and_grad(run, (0, 1), has_aux=True))

    (_, out), gradients = loss(ours)(variables, X)
    (_, wanted), wanted_gradients = loss(theirs)(variables, X)
    same(out, wanted, atol=1e-5)
    same(gradients, wanted_gradients, rtol=1e-4, atol=1e-4)
    how: dict[str, Any] = {"decode": False, "rngs": nnx.Rngs(0)}
    twin = nnx.MultiHeadAttention(4, 32, attention_fn=ma.attention_fn(CHUNKS), **how)
    out = compiled(updated(twin, variables["params"]), X, mask=mask)
    np.testing.assert_allclose(out, wanted, atol=1e-5)


@pytest.mark.parametrize("in_float32", [False, True])
def test_weights_are_sown_into_linen_s_collection(in_float32: bool):
    how: dict[str, Any] = {
        "num_heads": 4, "dtype": jnp.bfloat16, "force_fp32_for_softmax": in_float32,
    }  # fmt: skip
    theirs = nn.MultiHeadDotProductAttention(**how)
    ours = nn.MultiHeadDotProductAttention(**how, attention_fn=ma.attention_fn(CHUNKS))
    variables = theirs.init(jax.random.key(0), X)
    (out, got), (wanted_out, wanted) = (
        jax.jit(partial(module.apply, sow_weights=True, mutable=["intermediates"]))(variables, X)
        for module in (ours, theirs)
    )
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, wanted)
    both = (got, out), (wanted, wanted_out)
    wide = (jax.tree.map(lambda x: np.asarray(x, np.float32), x) for x in both)
    same(*wide, atol=0.02)


@pytest.mark.parametrize("name", ["qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_products_of_quantisation_are_refused(name: str):
    given: dict[str, Any] = {f"{name}_cls": lambda: jnp.einsum}
    module = nn.MultiHeadDotProductAttention(num_heads=4, attention_fn=ma.attention_fn(), **given)
    with pytest.raises(ma.errors.Unsupported) as caught:
        module.init(jax.random.key(0), X)
    assert caught.value.setting == name and f"leave {name}_cls out" in caught.value.remedy
