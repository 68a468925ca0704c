"""`swap` on whole models: equal outputs, gradients and parameters, and a reason for each skip."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import InputError
from tests.golden_text import check_golden

C, HEADS = 16, 4
BLOCKWISE = ma.AttentionConfig(
    use_memory_efficient_attention=True, query_chunk_size=4, key_chunk_size=4
)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        how = {"decode": False, "rngs": rngs}
        self.norm = nnx.LayerNorm(C, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, C, **how)
        self.cross = nnx.MultiHeadAttention(
            HEADS, C, in_kv_features=8, num_kv_heads=2, normalize_qk=True, **how
        )

    def __call__(self, x: jax.Array, text: jax.Array) -> jax.Array:
        x = x + self.attn(self.norm(x), is_causal=True)
        return x + self.cross(x, text)


class HandMadeAttention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.qkv = nnx.Linear(C, 3 * C, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([Block(rngs)])
        self.stacked = nnx.vmap(lambda key: Block(nnx.Rngs(key)))(
            jax.random.split(jax.random.key(7), 2)
        )

    def __call__(self, x: jax.Array, text: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x, text)
        step = nnx.scan(lambda x, block: block(x, text), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return step(x, self.stacked)


class Odd(nnx.Module):
    """Attention of every kind that `swap` skips."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        def mine(query, key, value, **_):
            return value

        self.dropping = nnx.MultiHeadAttention(HEADS, C, dropout_rate=0.1, decode=False, rngs=rngs)
        self.hand_made = HandMadeAttention(rngs)
        self.own = ma.FlaxAttention(query_dim=C, heads=2, dim_head=8, rngs=rngs)
        self.told = nnx.MultiHeadAttention(HEADS, C, attention_fn=mine, decode=False, rngs=rngs)
        self.quiet = nnx.MultiHeadAttention(
            HEADS, C, dropout_rate=0.1, deterministic=True, decode=False, rngs=rngs
        )


X = jax.random.normal(jax.random.key(0), (2, 9, C))
TEXT = jax.random.normal(jax.random.key(1), (2, 5, 8))


@nnx.jit
def run(model: Model):
    """Return a scalar of the output, and its gradients."""
    return nnx.value_and_grad(lambda m: jnp.sum(jnp.sin(m(X, TEXT)) * jnp.arange(C)))(model)


def check_same(got: Any, want: Any, within: float = 2e-5) -> None:
    """Compare outputs, and gradients within float32 rounding of their own scale."""
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=2e-5 * np.abs(want[0]).max())
    grads, wanted = jax.tree.leaves(got[1]), jax.tree.leaves(want[1])
    # The gradient of a key's bias is 0 but for rounding: it is compared on the scale of all.
    most = max(float(jnp.abs(grad).max()) for grad in wanted)
    for ours, theirs in zip(grads, wanted, strict=True):
        scale = max(float(jnp.abs(theirs).max()), 1e-2 * most)
        np.testing.assert_allclose(ours, theirs, atol=within * scale)


@pytest.mark.slow
def test_outputs_gradients_and_parameters_are_those_of_before():
    model = Model(nnx.Rngs(0))
    before = run(model)
    names = jax.tree.structure(nnx.to_pure_dict(nnx.state(model)))
    table = ma.swap(model, BLOCKWISE)
    assert [row.path for row in table.swapped] == [
        "blocks.0.attn", "blocks.0.cross", "stacked.attn", "stacked.cross",
    ]  # fmt: skip
    assert not table.left
    assert jax.tree.structure(nnx.to_pure_dict(nnx.state(model))) == names
    check_same(run(model), before)


def test_the_config_is_the_one_that_runs():
    model = Model(nnx.Rngs(0))
    ma.swap(model, BLOCKWISE)
    assert "scan" in str(jax.make_jaxpr(lambda x: model.blocks[0](x, TEXT))(X)), "chunk by chunk"
    block = model.blocks[0]
    assert [m.attention_fn.role for m in (block.attn, block.cross)] == ["self", "cross"]
    ma.swap(model, ma.AttentionConfig(attention="dot_product"))
    assert model.stacked.attn.attention_fn.config.attention == "dot_product"


def test_what_is_left_says_why():
    model = Odd(nnx.Rngs(0))
    table = ma.swap(model, ma.AttentionConfig(attention="dot_product"))
    check_golden("modules/swap", str(table))
    assert [row.path for row in table.swapped] == ["quiet"]
    assert model.dropping.attention_fn is nnx.dot_product_attention


def test_only_nnx_modules_are_swapped():
    with pytest.raises(InputError, match="model: dict"):
        ma.swap({})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
def test_modules_of_float64_are_left_and_answered_with_the_modules_dtype(name: str):
    with jax.enable_x64(True):
        how: dict[str, Any] = {"decode": False, "rngs": nnx.Rngs(0), name: jnp.float64}
        table = ma.swap(nnx.MultiHeadAttention(HEADS, C, **how))
        assert not table.swapped and table.left[0].why.startswith(f"{name}=float64: kernels")
        module = nnx.MultiHeadAttention(HEADS, C, attention_fn=ma.attention_fn(), **how)
        with pytest.raises(InputError) as caught:
            nnx.eval_shape(module, jnp.ones((1, 4, C)))
        assert caught.value.remedy == "build the module with dtype=jnp.float32"
        built = nnx.MultiHeadAttention(
            HEADS, C, attention_fn=ma.attention_fn(), **how | {"dtype": jnp.float32}
        )
        assert nnx.eval_shape(built, jnp.ones((1, 4, C))).dtype == jnp.float32
