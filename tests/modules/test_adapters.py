"""`attention_fn` in `nnx.MultiHeadAttention` against flax's own attention.

Compares outputs, gradients, cache and weights.
"""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn._attention import attention
from maxattn.config import AttentionConfig
from maxattn.errors import Unsupported
from maxattn.modules import adapters, attention_fn
from tests.waiting import but

C, N, T = 16, 4, 5
X = jax.random.normal(jax.random.key(0), (2, T, C))
DENSE = AttentionConfig(attention="dot_product")
EFFICIENT = AttentionConfig(use_memory_efficient_attention=True)
PADDING = (jnp.arange(T) < jnp.asarray([[3], [T]]))[:, None, None]


def mha(fn: Any, decode: bool = False, **how: Any) -> nnx.MultiHeadAttention:
    return nnx.MultiHeadAttention(
        num_heads=N, in_features=C, attention_fn=fn, decode=decode, rngs=nnx.Rngs(0), **how
    )


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
def test_weights_are_sown_and_said_to_be_dense(
    kv_heads: int | None, caplog: pytest.LogCaptureFixture
) -> None:
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
