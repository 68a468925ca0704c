"""`attention_fn` inside `nnx.MultiHeadAttention`, against flax's own attention: outputs, gradients,
cache, weights, and rotary embeddings, which `attention_fn` is given or `swap` keeps.
"""

from __future__ import annotations

import copy
import logging
import pickle
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn._attention import attention
from maxattn.config import AttentionConfig
from maxattn.errors import Unsupported
from maxattn.modules import adapters, attention_fn
from tests.golden_text import check_golden
from tests.reference import attention64
from tests.waiting import but

C, N, T = 16, 4, 5
X = jax.random.normal(jax.random.key(0), (2, T, C))
DENSE = AttentionConfig(attention="dot_product")
EFFICIENT = AttentionConfig(
    use_memory_efficient_attention=True, query_chunk_size=4, key_chunk_size=4
)
PADDING = (jnp.arange(T) < jnp.asarray([[3], [T]]))[:, None, None]


def mha(fn: Any, **how: Any) -> nnx.MultiHeadAttention:
    how = {"decode": False, "rngs": nnx.Rngs(0)} | how
    return nnx.MultiHeadAttention(N, C, attention_fn=fn, **how)


def pair(
    config: AttentionConfig = DENSE, **how: Any
) -> tuple[nnx.MultiHeadAttention, nnx.MultiHeadAttention]:
    return mha(attention_fn(config), **how), mha(nnx.dot_product_attention, **how)


BUILDS = {"plain": {}, "gqa": {"num_kv_heads": 2}, "normed": {"normalize_qk": True}}
CALLS = {
    "full": {},
    "causal": {"is_causal": True},
    "float_mask": {"mask": nnx.make_causal_mask(jnp.ones((2, T)))},
    "padding": {"mask": PADDING},
    "both": {"mask": PADDING & jnp.ones((T, 1), bool), "is_causal": True},
}


@nnx.jit
def of_every_call(module: nnx.MultiHeadAttention) -> dict[str, jax.Array]:
    """Call a module in all ways as one program, which compiles faster than separate operations."""
    return {name: module(X, **call) for name, call in CALLS.items()}


@pytest.mark.parametrize(
    ("build", "config"),
    but([("gqa", EFFICIENT), ("plain", DENSE), ("normed", DENSE)], [("gqa", EFFICIENT)]),
)
def test_outputs_are_flaxs(build: str, config: AttentionConfig) -> None:
    got, want = map(of_every_call, pair(config, **BUILDS[build]))
    for call in CALLS:
        np.testing.assert_allclose(got[call], want[call], atol=2e-6, err_msg=call)


@pytest.mark.parametrize(
    ("build", "call"), but([("normed", "padding"), ("gqa", "both")], [("gqa", "both")])
)
def test_gradients_are_flaxs(build: str, call: str) -> None:
    def loss(module: nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(module(x, **CALLS[call])) * jnp.arange(C))

    ours, theirs = (
        nnx.jit(nnx.grad(loss, argnums=(0, 1)))(m, X) for m in pair(EFFICIENT, **BUILDS[build])
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4), ours, theirs)


@pytest.mark.parametrize("lead", [pytest.param((1, 2, 3), marks=pytest.mark.slow), ()])
def test_any_number_of_batch_axes(lead: tuple[int, ...]) -> None:
    """A mask and a bias may lack batch axes, or have size 1 in them."""
    rng = np.random.default_rng(2)
    q = rng.standard_normal((*lead, T, N, 4), np.float32)
    full = (rng.random((1, T, T)) < 0.7) | np.eye(T, dtype=bool)
    fn, theirs = jax.jit(attention_fn(DENSE)), jax.jit(jax.nn.dot_product_attention)
    want = theirs(*[q.reshape(-1, T, N, 4)] * 3, mask=full)
    for mask in (full, full.reshape((1,) * len(lead) + full.shape), full.astype(np.int32)):
        np.testing.assert_allclose(fn(q, q, q, mask=mask).reshape(want.shape), want, atol=2e-6)
    bias = np.where(full, np.float32(0), np.float32(-1e9))
    np.testing.assert_allclose(fn(q, q, q, bias=bias).reshape(want.shape), want, atol=2e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_decoding_token_by_token_is_the_causal_call(is_causal: bool) -> None:
    _, theirs = pair(num_kv_heads=2)
    decoder = mha(attention_fn(DENSE), decode=True, num_kv_heads=2)
    decoder.init_cache((2, T, C))
    step = nnx.jit(lambda m, x: m(x, is_causal=is_causal))
    steps = [step(decoder, X[:, i : i + 1]) for i in range(T)]
    want = nnx.jit(lambda m, x: m(x, is_causal=True))(theirs, X)
    np.testing.assert_allclose(np.concatenate(steps, 1), want, atol=2e-6)


def test_dtype_and_precision_are_honoured() -> None:
    module = mha(attention_fn(DENSE), dtype=jnp.bfloat16, precision="highest")
    assert module(X).dtype == jnp.bfloat16
    q = jax.random.normal(jax.random.key(4), (1, T, N, 8))
    promoted = jax.eval_shape(attention_fn(DENSE), q.astype(jnp.bfloat16), q, q)
    low = jax.eval_shape(lambda q: attention_fn(DENSE)(q, q, q, dtype=jnp.float16), q)
    assert (promoted.dtype, low.dtype) == (jnp.float32, jnp.float16)
    text = str(jax.make_jaxpr(lambda q: attention_fn(DENSE)(q, q, q, precision="default"))(q))
    assert text.count("Precision.HIGHEST") >= 2  # never less than asked: float32 products are whole


def sown(module: nnx.MultiHeadAttention, mask: Any) -> tuple[jax.Array, jax.Array]:
    capture = nnx.capture(lambda m: m(X, mask=mask, sow_weights=True), nnx.Intermediate)
    out, state = nnx.jit(capture)(module)
    (weights,) = state["attention_weights"].get_value()
    return out, weights


@pytest.mark.parametrize("kv_heads", [None, 2])
def test_weights_are_sown_and_said_to_be_dense(kv_heads: int | None, caplog) -> None:
    adapters._say_dense.cache_clear()
    mask = nnx.make_causal_mask(jnp.ones((2, T)))
    with caplog.at_level(logging.WARNING, logger="maxattn"):
        ours, theirs = (sown(module, mask) for module in pair(num_kv_heads=kv_heads))
        sown(pair()[0], mask)
    np.testing.assert_allclose(ours[0], theirs[0], atol=2e-6)
    np.testing.assert_allclose(ours[1], theirs[1], atol=2e-6)
    assert [r.getMessage() for r in caplog.records if "sow_weights" in r.getMessage()] == [
        "sow_weights: attention is computed densely, with 5 x 5 scores per head, "
        "and not by the kernel of the config"
    ]


def test_sown_weights_of_a_query_without_keys_are_zero() -> None:
    _, weights = sown(mha(attention_fn(DENSE)), jnp.zeros((2, 1, T, T)))
    assert weights.shape == (2, N, T, T) and (weights == 0.0).all()


def test_the_role_chooses_the_setting() -> None:
    q, k = (jax.random.normal(jax.random.key(n), (1, n, N, 8)) for n in (T, 3))
    config = AttentionConfig(cross_attention="dot_product")
    want = attention(q, k, k, config=config, role="cross")
    np.testing.assert_array_equal(attention_fn(config, role="cross")(q, k, k), want)


def test_equal_settings_make_equal_functions_and_trace_once() -> None:
    again = AttentionConfig(attention="dot_product")
    assert attention_fn(DENSE) == attention_fn(again)
    assert hash(attention_fn(DENSE)) == hash(attention_fn(again))
    traces = []

    @nnx.jit
    def call(module: nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
        traces.append(1)
        return module(x)

    call(mha(attention_fn(DENSE)), X)
    call(mha(attention_fn(again)), X)
    assert len(traces) == 1


def test_dropout_on_probabilities_is_refused_unless_deterministic() -> None:
    module = mha(attention_fn(DENSE), dropout_rate=0.1)
    with pytest.raises(Unsupported) as caught:
        module(X, deterministic=False, rngs=nnx.Rngs(dropout=0))
    assert caught.value.setting == "dropout_rate"
    np.testing.assert_allclose(
        module(X, deterministic=True), mha(nnx.dot_product_attention)(X), atol=2e-6
    )


@pytest.mark.parametrize("keys", but([T - 2, T + 3], [T + 3]))
def test_a_causal_call_over_other_keys_is_that_of_flax(keys: int) -> None:
    ours, theirs = pair()
    other = np.random.default_rng(5).standard_normal((2, keys, C), np.float32)

    @nnx.jit
    def call(module: nnx.MultiHeadAttention, mask: Any = None) -> jax.Array:
        return module(X, other, is_causal=True, mask=mask)

    for mask in (None, np.ones((2, 1, T, keys), np.float32)):
        np.testing.assert_allclose(call(ours, mask), call(theirs), atol=2e-6)


# ---- rotary embeddings ---------------------------------------------------------------------------

H = C // N
TEXT = jax.random.normal(jax.random.key(1), (2, T - 2, C))
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
        (EFFICIENT, SHARED, {"inputs_k": TEXT}, True),
        (EFFICIENT, {}, {}, False),
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
    ma.swap(module, EFFICIENT)
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
    ma.swap(layers, EFFICIENT)
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
    ma.swap(module, EFFICIENT)
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
def test_positions_turn_queries_and_keys(batch: tuple[int, ...], shape: tuple[int, ...] | None):
    rng = np.random.default_rng(2)
    q, k, v = rng.standard_normal((3, *batch, T, N, H), np.float32)
    at = None if shape is None else rng.integers(-9, 90, shape, np.int32)
    fn = ma.attention_fn(EFFICIENT, rope=half_rope)
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
