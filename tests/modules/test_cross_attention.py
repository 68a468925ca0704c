"""`CrossAttention` against the module written again in numpy float64; `compute_kv` against the
direct call.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn import masks
from maxattn.modules import KV, CrossAttention
from maxattn.rope import rope_1d
from tests.modules.reference import cross_attention, params_of, randomise, turn

RNG = np.random.default_rng(3)
B, T, S, I, C, D, E, N, H = 2, 13, 7, 5, 20, 11, 9, 4, 6
X, TEXT, IMAGE = (
    RNG.standard_normal(shape).astype(np.float32) for shape in ((B, T, C), (B, S, D), (B, I, E))
)


def built(image: bool = False, **how: Any) -> CrossAttention:
    how = {"bias": True, "eps": 1e-3, **how}
    module = CrossAttention(
        C, D, heads=N, dim_head=H, added_kv_proj_dim=E if image else None, rngs=nnx.Rngs(0), **how
    )
    randomise(module)
    return module


@pytest.mark.parametrize(("image", "kv_heads"), [(False, None), (True, 2)])
@pytest.mark.parametrize("qk_norm", [None, "rms_norm", "rms_norm_across_heads", "layer_norm"])
def test_forward_is_the_numpy_module(
    qk_norm: str | None, image: bool, kv_heads: int | None
) -> None:
    module = built(image, qk_norm=qk_norm, kv_heads=kv_heads)
    picture = IMAGE if image else None
    want = cross_attention(params_of(module), np.float64(X), np.float64(TEXT), module, picture)
    got = module(X, TEXT, encoder_hidden_states_image=picture)
    np.testing.assert_allclose(got, want, atol=5e-6)


@pytest.mark.parametrize("image", [False, True])
def test_keys_and_values_made_once_give_the_same(image: bool) -> None:
    module = built(image, qk_norm="rms_norm_across_heads", kv_heads=2)
    picture = IMAGE if image else None
    kv = module.compute_kv(jnp.asarray(TEXT), picture)
    assert kv.k.shape == kv.v.shape == (B, S, 2, H)
    assert (kv.image_k is not None and kv.image_k.shape == (B, I, 2, H)) == image
    np.testing.assert_array_equal(
        module(X, kv=kv), module(X, TEXT, encoder_hidden_states_image=picture)
    )
    np.testing.assert_array_equal(jax.jit(lambda kv: kv)(kv).k, kv.k)  # a pytree


def test_the_kept_keys_are_normed() -> None:
    module = built(qk_norm="rms_norm")
    module.norm_k.scale.set_value(jnp.ones(H))  # type: ignore[union-attr]
    kv = module.compute_kv(jnp.asarray(TEXT))
    size = np.mean(np.square(kv.k), axis=-1)
    assert (size <= 1.0).all() and size.max() > 0.99


def test_the_text_mask_leaves_the_image_alone() -> None:
    module, lengths = built(True), np.asarray([3, 0])
    allowed = np.arange(S)[None, None, None] < lengths[:, None, None, None]
    want = cross_attention(
        params_of(module), np.float64(X), np.float64(TEXT), module, IMAGE, allowed
    )
    got = module(
        X, TEXT, encoder_hidden_states_image=IMAGE, mask=masks.KeyPadding(jnp.asarray(lengths))
    )
    np.testing.assert_allclose(got, want, atol=5e-6)
    assert np.abs(got[1]).max() > 0.1  # no text at all, and the image is still seen


def test_one_key_moves_only_its_example() -> None:
    module, other = built(), TEXT.copy()
    other[1, 3] += 1.0
    moved = np.abs(np.asarray(module(X, TEXT) - module(X, other))).max(axis=(1, 2))
    assert moved[0] == 0.0 and moved[1] > 1e-3


def test_positions_of_queries_and_keys_are_separate() -> None:
    module = built()
    p = params_of(module)
    at = {n: np.arange(n)[:, None] * 1e4 ** (-np.arange(0, H, 2) / H) for n in (T, S)}
    q_table, k_table = rope_1d(H, T), rope_1d(H, S)
    q = turn((np.float64(X) @ p["to_q"]["kernel"] + p["to_q"]["bias"]).reshape(B, T, N, H), at[T])
    k = (np.float64(TEXT) @ p["to_k"]["kernel"] + p["to_k"]["bias"]).reshape(B, S, N, H)
    v = (np.float64(TEXT) @ p["to_v"]["kernel"] + p["to_v"]["bias"]).reshape(B, S, N, H)

    def out(k: np.ndarray) -> np.ndarray:
        s = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
        e = np.exp(s - s.max(-1, keepdims=True))
        o = np.einsum("bnts,bsnh->btnh", e / e.sum(-1, keepdims=True), v).reshape(B, T, N * H)
        return o @ p["to_out"]["kernel"] + p["to_out"]["bias"]

    np.testing.assert_allclose(module(X, TEXT, rotary_emb=q_table), out(k), atol=5e-6)
    both = module(X, TEXT, rotary_emb=q_table, rotary_emb_k=k_table)
    np.testing.assert_allclose(both, out(turn(k, at[S])), atol=5e-6)
    kept = module.compute_kv(jnp.asarray(TEXT), rotary_emb_k=k_table)
    np.testing.assert_array_equal(module(X, kv=kept, rotary_emb=q_table), both)


def test_gradients_are_those_of_dense_autodiff() -> None:
    module = built(True, qk_norm="rms_norm_across_heads", kv_heads=2)
    inputs = tuple(jnp.asarray(a) for a in (X, TEXT, IMAGE))
    weight = jnp.asarray(RNG.standard_normal((B, T, C)), jnp.float32)

    def loss(module: CrossAttention, x: jax.Array, text: jax.Array, image: jax.Array) -> jax.Array:
        return jnp.sum(module(x, text, encoder_hidden_states_image=image) * weight)

    def dense(params: dict, x: jax.Array, text: jax.Array, image: jax.Array) -> jax.Array:
        return jnp.sum(cross_attention(params, x, text, module, image, xp=jnp) * weight)

    got = nnx.jit(nnx.grad(loss, argnums=(0, 1, 2, 3)))(module, *inputs)
    want = jax.jit(jax.grad(dense, argnums=(0, 1, 2, 3)))(params_of(module, np.float32), *inputs)
    got = (nnx.to_pure_dict(got[0]), *got[1:])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=5e-5, rtol=1e-4), got, want)


def test_parameters_have_the_names_and_shapes_of_checkpoints() -> None:
    shapes = jax.tree.map(
        lambda a: a.shape, params_of(built(True, qk_norm="rms_norm_across_heads", bias=False))
    )
    assert shapes == {
        "to_q": {"kernel": (20, 24)}, "to_k": {"kernel": (11, 24)}, "to_v": {"kernel": (11, 24)},
        "to_out": {"kernel": (24, 20), "bias": (20,)},
        "add_k_proj": {"kernel": (9, 24)}, "add_v_proj": {"kernel": (9, 24)},
        "norm_q": {"scale": (24,)}, "norm_k": {"scale": (24,)}, "norm_added_k": {"scale": (24,)},
    }  # fmt: skip


def test_the_other_sequence_has_the_width_of_the_query_by_default() -> None:
    module = CrossAttention(C, heads=N, dim_head=H, rngs=nnx.Rngs(0))
    assert module.to_k.kernel.get_value().shape == (C, N * H)


def test_dropout_falls_on_the_output_alone() -> None:
    module = built(dropout=0.5)
    kept, dropped = module(X, TEXT), module(X, TEXT, deterministic=False, rngs=nnx.Rngs(dropout=0))
    zero = np.asarray(dropped) == 0.0
    assert 0.4 < zero.mean() < 0.6
    np.testing.assert_allclose(np.asarray(dropped)[~zero], 2.0 * np.asarray(kept)[~zero], rtol=1e-5)


def test_a_kv_of_two_is_text_alone() -> None:
    kv = KV(jnp.ones((1, 2, 3, 4)), jnp.ones((1, 2, 3, 4)))
    assert len(jax.tree.leaves(kv)) == 2
