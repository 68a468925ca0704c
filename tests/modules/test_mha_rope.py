"""Rotary embeddings in `nnx.MultiHeadAttention`: `attention_fn(rope=)`, `swap`, against flax."""

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
from maxattn.errors import InputError
from tests.golden_text import check_golden
from tests.pairwise import pairwise, product
from tests.reference import attention64

C, N, T = 32, 4, 7
H = C // N
X = jax.random.normal(jax.random.key(0), (2, T, C))
TEXT = jax.random.normal(jax.random.key(1), (2, 5, C))
BLOCKWISE = ma.AttentionConfig(
    use_memory_efficient_attention=True, query_chunk_size=4, key_chunk_size=4
)
DENSE = ma.AttentionConfig(attention="dot_product")
flax: Any = nnx  # its ropes are newer than the oldest flax that is supported
needs_flax_rope = pytest.mark.skipif(
    not hasattr(nnx, "dot_product_attention_with_rope"), reason="this flax has no nnx.RoPE"
)


def half_rope(x: jax.Array, positions: jax.Array | None = None) -> jax.Array:
    """Turn [..., T, H] in the half style, as `nnx.RoPE` does; every flax has this one."""
    at = jnp.arange(x.shape[-2]) if positions is None else positions
    angles = at[:, None] * 1e4 ** -(jnp.arange(0, x.shape[-1], 2) / x.shape[-1])
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def turned64(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Turn [B, T, N, H] by positions [B, T] in float64."""
    x = np.asarray(x, np.float64)
    angles = positions[..., None, None] * 1e4 ** -(np.arange(0, x.shape[-1], 2) / x.shape[-1])
    a, b = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def mha(fn: Any, **how: Any) -> nnx.MultiHeadAttention:
    how = {"decode": False, "rngs": nnx.Rngs(0)} | how
    return nnx.MultiHeadAttention(N, C, attention_fn=fn, **how)


def flax_mha(rope: Any, **how: Any) -> nnx.MultiHeadAttention:
    return mha(partial(flax.dot_product_attention_with_rope, rope=rope), **how)


def ropes() -> list[Any]:
    return [flax.RoPE(), flax.RoPE(theta=100.0, embedding_size=H, max_seq_len=16)]


AXES: dict[str, list[Any]] = {
    "config": ["dense", "blockwise"],
    "build": ["plain", "shared keys"],
    "call": ["full", "causal", "text"],
    "rope": [0, 1],
}
CONFIGS = {"dense": DENSE, "blockwise": BLOCKWISE}
BUILDS = {"plain": {}, "shared keys": {"num_kv_heads": 2, "normalize_qk": True}}
CALLS = {"full": {}, "causal": {"is_causal": True}, "text": {"inputs_k": TEXT}}
PAIRS = pairwise(AXES, lambda case: True)


def name(case: dict[str, Any]) -> str:
    return "-".join(map(str, case.values()))


def check_swap(case: dict[str, Any]) -> None:
    """Compare output and gradients before and after `swap`."""
    build, call = BUILDS[case["build"]], CALLS[case["call"]]

    @nnx.jit
    @partial(nnx.value_and_grad, argnums=(0, 1), has_aux=True)
    def step(module: nnx.MultiHeadAttention, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = module(x, **call)
        return jnp.sum(jnp.sin(out) * jnp.arange(C)), out

    module = flax_mha(ropes()[case["rope"]], **build)
    want = step(module, X)
    (row,) = ma.swap(module, CONFIGS[case["config"]]).rows
    assert row.swapped and row.why.endswith(", after its rope")
    got = step(module, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5, rtol=1e-4), got, want)
    plain = nnx.jit(lambda m, x: m(x, **call))(mha(nnx.dot_product_attention, **build), X)
    assert np.abs(plain - got[0][1]).max() > 1e-2, "the rope turned nothing"


@needs_flax_rope
@pytest.mark.parametrize("case", PAIRS, ids=name)
def test_a_swapped_mha_with_rope_is_flaxs(case: dict[str, Any]) -> None:
    check_swap(case)


@needs_flax_rope
@pytest.mark.slow
@pytest.mark.parametrize("case", product(AXES, lambda case: case not in PAIRS), ids=name)
def test_a_swapped_mha_in_every_way(case: dict[str, Any]) -> None:
    check_swap(case)


@needs_flax_rope
def test_another_swap_keeps_the_rope_and_weights_may_be_sown() -> None:
    module = flax_mha(ropes()[1])
    want, seen = nnx.capture(lambda m: m(X, sow_weights=True), nnx.Intermediate)(module)
    ma.swap(module, DENSE)
    ma.swap(module, BLOCKWISE)
    np.testing.assert_allclose(module(X), want, atol=2e-6)
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
    ma.swap(layers, BLOCKWISE)
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


@pytest.mark.parametrize("config", [DENSE, BLOCKWISE], ids=["dense", "blockwise"])
@pytest.mark.parametrize("shape", [(T,), (1, T), (2, T), None])
def test_positions_turn_queries_and_keys(config: Any, shape: tuple[int, ...] | None) -> None:
    q, k, v = jax.random.normal(jax.random.key(2), (3, 2, T, N, H))
    at = None if shape is None else jax.random.randint(jax.random.key(4), shape, -9, 90)
    fn = ma.attention_fn(config, rope=half_rope)
    where = np.broadcast_to(np.arange(T) if at is None else np.asarray(at), (2, T))
    want = attention64(turned64(q, where), turned64(k, where), v)
    np.testing.assert_allclose(fn(q, k, v, input_positions=at), want.out, atol=5e-6)


@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_positions_of_any_number_of_batch_axes(batch: tuple[int, ...]) -> None:
    x = jax.random.normal(jax.random.key(2), (*batch, T, N, H))
    at = jax.random.randint(jax.random.key(4), (*batch, T), 0, 50)
    got = ma.attention_fn(DENSE, rope=half_rope)(x, x, x, input_positions=at)
    flat, where = x.reshape(-1, T, N, H), np.asarray(at).reshape(-1, T)
    want = attention64(turned64(flat, where), turned64(flat, where), flat).out
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=5e-6)


@needs_flax_rope
def test_flaxs_call_hands_positions_on() -> None:
    module = flax_mha(flax.RoPE())
    ma.swap(module, BLOCKWISE)
    at = jnp.stack([jnp.arange(T), 3 * jnp.arange(T) + 5])
    np.testing.assert_allclose(module(X, input_positions=jnp.arange(T)), module(X), atol=2e-6)
    both = module(X, input_positions=at)
    np.testing.assert_allclose(both[1], module(X[1:], input_positions=at[1])[0], atol=2e-6)
    assert np.abs(both[1] - module(X)[1]).max() > 1e-2


def test_gradients_flow_through_positions() -> None:
    fn, at = ma.attention_fn(BLOCKWISE, rope=half_rope), jnp.stack([jnp.arange(T), jnp.arange(T)])
    q, k, v, w = jax.random.normal(jax.random.key(6), (4, 2, T, N, H))

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        turn = jax.vmap(half_rope, in_axes=-2, out_axes=-2)
        return jnp.sum(w * jax.nn.dot_product_attention(turn(q), turn(k), v))

    got = jax.grad(lambda *x: jnp.sum(w * fn(*x, input_positions=at)), (0, 1, 2))(q, k, v)
    for ours, want in zip(got, jax.grad(plain, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(ours, want, atol=2e-5)


def test_it_is_a_value() -> None:
    fn = ma.attention_fn(DENSE, rope=half_rope)
    assert fn == ma.attention_fn(DENSE, rope=half_rope) and fn != ma.attention_fn(DENSE)
    assert pickle.loads(pickle.dumps(fn)) == fn and copy.deepcopy(fn) == fn


def test_positions_that_cannot_be_used_are_refused() -> None:
    q, fn = jnp.ones((2, T, N, H)), ma.attention_fn(DENSE, rope=half_rope)
    calls = {
        "no rope": lambda: ma.attention_fn(DENSE)(q, q, q, input_positions=jnp.arange(T)),
        "other keys": lambda: fn(q, q[:, :3], q[:, :3], input_positions=jnp.arange(T)),
        "length": lambda: fn(q, q, q, input_positions=jnp.arange(3)),
        "batch": lambda: fn(q, q, q, input_positions=jnp.ones((3, T))),
        "no number": lambda: ma.attention_fn(DENSE, rope=7),  # type: ignore[arg-type]
    }
    said = []
    for name, call in calls.items():
        with pytest.raises(InputError) as caught:
            call()
        said.append(f"# {name}\n{caught.value}")
    check_golden("modules/input_positions", "\n".join(said))
