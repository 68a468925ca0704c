"""Rotary embeddings in `nnx.MultiHeadAttention` (`attention_fn(rope=)`, `swap`), against flax."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from tests.golden_text import check_golden
from tests.reference import attention64

C, N, T = 32, 4, 7
H = C // N
X = jax.random.normal(jax.random.key(0), (2, T, C))
TEXT = jax.random.normal(jax.random.key(1), (2, 5, C))
CHUNKS = ma.AttentionConfig(
    use_memory_efficient_attention=True, query_chunk_size=4, key_chunk_size=4
)
DENSE = ma.AttentionConfig(attention="dot_product")
flax: Any = nnx  # its ropes are newer than the oldest flax that is supported
needs_flax_rope = pytest.mark.skipif(
    not hasattr(nnx, "dot_product_attention_with_rope"), reason="this flax has no nnx.RoPE"
)


def half_rope(x: Any, positions: Any = None, xp: Any = jnp) -> Any:
    """Rotate [..., T, H] in the half style, as `nnx.RoPE` does in every flax that has it."""
    at = xp.arange(x.shape[-2]) if positions is None else positions
    angles = at[..., None] * 1e4 ** -(np.arange(0, x.shape[-1], 2) / x.shape[-1])
    a, b = xp.split(x, 2, axis=-1)
    cos, sin = xp.cos(angles), xp.sin(angles)
    return xp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def mha(fn: Any, **how: Any) -> nnx.MultiHeadAttention:
    how = {"decode": False, "rngs": nnx.Rngs(0)} | how
    return nnx.MultiHeadAttention(N, C, attention_fn=fn, **how)


def flax_mha(rope: Any, **how: Any) -> nnx.MultiHeadAttention:
    return mha(partial(flax.dot_product_attention_with_rope, rope=rope), **how)


def short_rope() -> Any:
    return flax.RoPE(theta=100.0, embedding_size=H, max_seq_len=16)


# ---- swap keeps flax's rope ----------------------------------------------------------------------

SHARED = {"num_kv_heads": 2, "normalize_qk": True}


@needs_flax_rope
@pytest.mark.parametrize(
    ("config", "build", "call", "is_short"),
    [
        (DENSE, {}, {"is_causal": True}, False),
        (CHUNKS, SHARED, {"inputs_k": TEXT}, True),
        (CHUNKS, {}, {}, False),
    ],
    ids=["causal", "shared_keys_of_a_text", "full"],
)
def test_a_swapped_mha_with_rope_is_flaxs(
    config: Any, build: dict[str, Any], call: dict[str, Any], is_short: bool
) -> None:
    @nnx.jit
    @partial(nnx.value_and_grad, argnums=(0, 1), has_aux=True)
    def step(module: nnx.MultiHeadAttention, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = module(x, **call)
        return jnp.sum(jnp.sin(out) * jnp.arange(C)), out

    module = flax_mha(short_rope() if is_short else flax.RoPE(), **build)
    want = step(module, X)
    (row,) = ma.swap(module, config).rows
    assert row.swapped and row.why.endswith(", after its rope")
    got = step(module, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5, rtol=1e-4), got, want)


@needs_flax_rope
def test_another_swap_keeps_the_rope_and_weights_may_be_sown() -> None:
    module = flax_mha(short_rope())
    want, seen = nnx.capture(lambda m: m(X, sow_weights=True), nnx.Intermediate)(module)
    ma.swap(module, DENSE)
    ma.swap(module, CHUNKS)
    np.testing.assert_allclose(module(X), want, atol=2e-6)
    assert np.abs(mha(nnx.dot_product_attention)(X) - want).max() > 1e-2, "the rope turned nothing"
    _, ours = nnx.capture(lambda m: m(X, sow_weights=True), nnx.Intermediate)(module)
    a, b = (s["attention_weights"].get_value()[0] for s in (ours, seen))
    np.testing.assert_allclose(a, b, atol=2e-6)


@needs_flax_rope
def test_stacked_layers_share_their_rope() -> None:
    rope = flax.RoPE()
    layers = nnx.vmap(lambda key: flax_mha(rope, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(3), 2)
    )
    run = nnx.scan(lambda x, m: x + m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    want = run(X, layers)
    ma.swap(layers, CHUNKS)
    np.testing.assert_allclose(run(X, layers), want, atol=1e-5)


@needs_flax_rope
def test_partials_that_bind_more_are_left_and_named() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            with_rope, plain = flax.dot_product_attention_with_rope, nnx.dot_product_attention
            fast = partial(with_rope, rope=flax.RoPE(), precision="highest")
            self.fast = mha(fast)
            self.less = mha(with_rope)
            self.mine = mha(partial(plain, is_causal=True))
            self.turned = flax_mha(flax.RoPE())

    check_golden("modules/swap_rope", str(ma.swap(Model(), DENSE)))


@needs_flax_rope
def test_flaxs_call_hands_positions_on() -> None:
    module = flax_mha(flax.RoPE())
    ma.swap(module, CHUNKS)
    at = jnp.stack([jnp.arange(T), 3 * jnp.arange(T) + 5])
    plain, both = module(X), module(X, input_positions=at)
    np.testing.assert_allclose(both[0], plain[0], atol=2e-6)
    np.testing.assert_allclose(both[1], module(X[1:], input_positions=at[1])[0], atol=2e-6)
    assert np.abs(both[1] - plain[1]).max() > 1e-2


# ---- attention_fn(rope=) -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "shape"),
    [((2,), None), ((2,), (T,)), ((2,), (1, T)), ((2,), (2, T)), ((), (T,)), ((2, 3), (2, 3, T))],
)
def test_positions_turn_queries_and_keys(
    batch: tuple[int, ...], shape: tuple[int, ...] | None
) -> None:
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, *batch, T, N, H), np.float32)
    at = None if shape is None else rng.integers(-9, 90, shape, np.int32)
    fn = ma.attention_fn(CHUNKS, rope=half_rope)
    got = jax.jit(lambda *of: fn(*of[:3], input_positions=of[3]))(q, k, v, at)
    where = np.broadcast_to(np.arange(T) if at is None else np.asarray(at), (*batch, T))
    where = where.reshape(-1, 1, T)

    def turned(x: Any) -> Any:
        by_head = np.asarray(x, np.float64).reshape(-1, T, N, H).swapaxes(1, 2)
        return half_rope(by_head, where, np).swapaxes(1, 2)

    want = attention64(turned(q), turned(k), np.asarray(v).reshape(-1, T, N, H)).out
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=5e-6)


def test_it_is_a_value() -> None:
    fn = ma.attention_fn(DENSE, rope=half_rope)
    assert fn == ma.attention_fn(DENSE, rope=half_rope) and fn != ma.attention_fn(DENSE)
    assert pickle.loads(pickle.dumps(fn)) == fn and copy.deepcopy(fn) == fn
