"""`FlaxAttention` against the whole module written again in numpy float64, and its gradients
against dense autodiff.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn import masks
from maxattn.config import AttentionConfig
from maxattn.modules import FlaxAttention
from maxattn.rope import rope_1d, rope_3d
from tests.modules.reference import params_of, randomise, self_attention

RNG = np.random.default_rng(2)
B, T, C, N, H = 2, 15, 20, 4, 6


def states(t: int = T) -> np.ndarray:
    return RNG.standard_normal((B, t, C)).astype(np.float32)


def built(**how: Any) -> FlaxAttention:
    module = FlaxAttention(C, heads=N, dim_head=H, rngs=nnx.Rngs(0), **how)
    randomise(module)
    return module


def angles(t: int = T) -> np.ndarray:
    return np.arange(t)[:, None] * 1e4 ** (-np.arange(0, H, 2) / H)


@pytest.mark.parametrize("kv_heads", [None, 2])
@pytest.mark.parametrize("qk_norm", [None, "rms_norm", "rms_norm_across_heads", "layer_norm"])
def test_forward_is_the_numpy_module(qk_norm: str | None, kv_heads: int | None) -> None:
    module, x = built(qk_norm=qk_norm, kv_heads=kv_heads, bias=True, eps=1e-3), states()
    want = self_attention(params_of(module), np.float64(x), module, angles())
    np.testing.assert_allclose(module(x, rope_1d(H, T)), want, atol=5e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_is_near_the_numpy_module_and_keeps_its_dtype(dtype: Any) -> None:
    module, x = built(qk_norm="rms_norm", dtype=dtype), states()
    y = module(jnp.asarray(x, dtype), rope_1d(H, T))
    want = self_attention(params_of(module), np.float64(x), module, angles())
    assert y.dtype == dtype
    assert module.to_q.kernel.get_value().dtype == jnp.float32
    np.testing.assert_allclose(np.float64(y), want, atol=0.06 if dtype == jnp.bfloat16 else 0.01)


SOME, NONE = np.asarray([4, T]), np.asarray([0, T])
KEYS = np.arange(T)[None, None, None]
MASKS = {
    "causal": (masks.Causal(), np.tril(np.ones((T, T), bool))),
    "window": (masks.LocalWindow(2, 1), np.tril(np.triu(np.ones((T, T), bool), -2), 1)),
    "padding": (masks.KeyPadding(SOME), SOME[:, None, None, None] > KEYS),
    "nothing": (masks.KeyPadding(NONE), NONE[:, None, None, None] > KEYS),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_biases_reach_the_attention(name: str) -> None:
    mask, allowed = MASKS[name]
    module, x = built(), states()
    bias = RNG.standard_normal((1, N, T, T)).astype(np.float32)
    want = self_attention(params_of(module), np.float64(x), module, None, allowed, np.float64(bias))
    np.testing.assert_allclose(module(x, mask=mask, bias=jnp.asarray(bias)), want, atol=5e-6)


def test_a_boolean_array_is_a_mask() -> None:
    module, x = built(), states()
    allowed = MASKS["causal"][1]
    np.testing.assert_array_equal(module(x, mask=allowed), module(x, mask=masks.Dense(allowed)))


def test_sizes_scale_and_biases_are_those_asked_for() -> None:
    module, x = built(out_dim=9, scale=0.7, out_bias=False), states(1)
    assert module(x).shape == (B, 1, 9)
    assert set(params_of(module)) == {"to_q", "to_k", "to_v", "to_out"}
    assert all(set(p) == {"kernel"} for p in params_of(module).values())
    x = states()
    np.testing.assert_allclose(
        module(x), self_attention(params_of(module), np.float64(x), module), atol=5e-6
    )


def test_parameters_have_the_names_and_shapes_of_checkpoints() -> None:
    module = built(qk_norm="rms_norm_across_heads", kv_heads=2, bias=True)
    shapes = jax.tree.map(lambda a: a.shape, params_of(module))
    assert shapes == {
        "to_q": {"kernel": (20, 24), "bias": (24,)}, "to_k": {"kernel": (20, 12), "bias": (12,)},
        "to_v": {"kernel": (20, 12), "bias": (12,)}, "to_out": {"kernel": (24, 20), "bias": (20,)},
        "norm_q": {"scale": (24,)}, "norm_k": {"scale": (12,)},
    }  # fmt: skip


def test_query_heads_share_neighbouring_key_heads() -> None:
    shared = built(kv_heads=2)
    full = built()
    for name in ("to_q", "to_out"):
        nnx.update(getattr(full, name), nnx.state(getattr(shared, name)))
    for name in ("to_k", "to_v"):
        kernel = getattr(shared, name).kernel.get_value().reshape(C, 2, H)
        getattr(full, name).kernel.set_value(jnp.repeat(kernel, 2, axis=1).reshape(C, N * H))
    x = states()
    np.testing.assert_allclose(shared(x), full(x), atol=1e-5)


def test_keys_may_have_positions_of_their_own() -> None:
    module, x = built(), states()
    table = rope_1d(H, 2 * T)
    late = type(table)(table.cos[T:], table.sin[T:])
    early = rope_1d(H, T)
    np.testing.assert_array_equal(module(x, early, rotary_emb_k=early), module(x, early))
    np.testing.assert_allclose(module(x, late), module(x, early), atol=1e-5)  # only distances count
    assert np.abs(module(x, late, rotary_emb_k=early) - module(x, early)).max() > 1e-2


def test_wans_spelling_of_positions() -> None:
    module, x = built(), states(12)
    table = rope_3d(H, 3, 2, 2)
    frequencies = (table.cos + 1j * table.sin)[None, None]
    np.testing.assert_array_equal(module(x, frequencies), module(x, table))


@pytest.mark.parametrize(
    ("qk_norm", "kernel"), [("rms_norm_across_heads", "dot_product"), ("layer_norm", "efficient")]
)
def test_gradients_are_those_of_dense_autodiff(qk_norm: str, kernel: str) -> None:
    efficient = {"use_memory_efficient_attention": True, "query_chunk_size": 4, "key_chunk_size": 8}
    config = AttentionConfig(
        attention="dot_product", **(efficient if kernel == "efficient" else {})
    )
    module, x = built(qk_norm=qk_norm, kv_heads=2, bias=True, config=config), jnp.asarray(states())
    weight = jnp.asarray(RNG.standard_normal((B, T, C)), jnp.float32)
    table, causal = rope_1d(H, T), MASKS["causal"]

    def loss(module: FlaxAttention, x: jax.Array) -> jax.Array:
        return jnp.sum(module(x, table, mask=causal[0]) * weight)

    def dense(params: dict, x: jax.Array) -> jax.Array:
        return jnp.sum(self_attention(params, x, module, angles(), causal[1], xp=jnp) * weight)

    got_p, got_x = nnx.jit(nnx.grad(loss, argnums=(0, 1)))(module, x)
    want_p, want_x = jax.jit(jax.grad(dense, argnums=(0, 1)))(params_of(module, np.float32), x)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5, rtol=1e-4),
        nnx.to_pure_dict(got_p),
        want_p,
    )
    np.testing.assert_allclose(got_x, want_x, atol=5e-5, rtol=1e-4)


def test_dropout_falls_on_the_output_alone() -> None:
    module, x = built(dropout=0.25), states()
    kept = np.asarray(module(x))
    dropped = np.asarray(module(x, deterministic=False, rngs=nnx.Rngs(dropout=3)))
    zero = dropped == 0.0
    assert 0.15 < zero.mean() < 0.35
    np.testing.assert_allclose(dropped[~zero], (kept / 0.75)[~zero], rtol=1e-5, atol=1e-7)
    again = np.asarray(module(x, deterministic=False, rngs=nnx.Rngs(dropout=3)))
    other = np.asarray(module(x, deterministic=False, rngs=nnx.Rngs(dropout=4)))
    np.testing.assert_array_equal(dropped, again)
    assert (dropped != other).any()


def test_no_dropout_needs_no_randomness() -> None:
    module, x = built(), states()
    np.testing.assert_array_equal(module(x, deterministic=False), module(x))


def test_named_scopes_are_there_when_asked_for() -> None:
    x = states()
    names = ("maxattn/to_qkv", "maxattn/norm", "maxattn/rope", "maxattn/to_out")
    for on in (True, False):
        module = built(config=AttentionConfig(enable_jax_named_scopes=on), qk_norm="rms_norm")
        text = jax.jit(lambda x, m=module: m(x, rope_1d(H, T))).lower(x).as_text(debug_info=True)
        # A scope stands behind the function's name; a file's path may hold the same words.
        assert [f"jit(<lambda>)/{name}/" in text for name in names] == [on] * 4
