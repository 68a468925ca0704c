"""`FlaxAttention` against an independent version in float64: outputs, gradients, settings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import masks
from maxattn.modules import FlaxAttention, attention_flat, merge_heads, split_heads
from maxattn.rope import rope_1d, rope_3d
from tests.modules.reference import (
    attend,
    called,
    check_gradients,
    compiled,
    params_of,
    randomise,
)

RNG = np.random.default_rng(2)
B, T, C, N, H = 2, 12, 20, 4, 6
X = RNG.standard_normal((B, T, C)).astype(np.float32)
ROPE = rope_1d(H, T)
CHUNKS = ma.AttentionConfig(
    use_memory_efficient_attention=True, query_chunk_size=4, key_chunk_size=8
)


def table(width: int, *lead: int, style: str = "interleaved", partial: bool = False) -> ma.Rotary:
    angles = RNG.uniform(0, 6, (*lead, width))
    return ma.Rotary(*(f(angles).astype(np.float32) for f in (np.cos, np.sin)), style, partial)


def built(**how: Any) -> FlaxAttention:
    how = {"heads": N, "dim_head": H, "eps": 1e-3, "rngs": nnx.Rngs(0)} | how
    return randomise(FlaxAttention(C, **how))


# ---- against float64 -----------------------------------------------------------------------------

SETTINGS: dict[str, tuple[dict[str, Any], Any]] = {
    "plain": ({}, None),
    "shared_keys": ({"kv_heads": 2, "bias": True}, ROPE),
    "rms_norm": ({"qk_norm": "rms_norm", "kv_heads": 2, "bias": True}, ROPE),
    "norm_across_heads": ({"qk_norm": "rms_norm_across_heads", "kv_heads": 2, "bias": True}, ROPE),
    "layer_norm": ({"qk_norm": "layer_norm", "config": CHUNKS}, ROPE),
    "zero_centred_norm": ({"qk_norm": "zero_centred_rms_norm"}, table(H // 2, B, T)),
    "heads_joined": ({"out_proj": False}, None),
    "gated_heads_joined": ({"gate": "per_head", "out_proj": False, "out_dim": N * H}, None),
    "gate_of_heads": ({"gate": "per_head", "bias": True}, table(H // 2, B, T, N)),
    "gate_of_channels": ({"gate": "per_channel", "kv_heads": 2}, None),
    "angles_of_heads_in_halves": ({}, table(H // 2, B, T, N, style="half")),
    "angles_of_a_part": ({}, table(H // 2 - 1, 1, T, style="half", partial=True)),
    "sizes": ({"out_dim": 9, "scale": 0.7, "out_bias": False}, None),
}
WITH_GRADIENTS = (
    "norm_across_heads", "layer_norm", "zero_centred_norm", "gate_of_heads", "gate_of_channels",
    "angles_of_a_part",
)  # fmt: skip


@pytest.mark.parametrize("name", [name for name in SETTINGS if name not in WITH_GRADIENTS])
def test_output(name: str) -> None:
    how, rotary = SETTINGS[name]
    module = built(**how)
    got = compiled(module, X, rotary)
    assert got.shape == (B, T, module.out_dim)
    want = called(params_of(module), module, np.float64(X), rotary=rotary)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("name", WITH_GRADIENTS)
def test_gradients(name: str) -> None:
    how, rotary = SETTINGS[name]
    mask, allowed = MASKS["causal"]
    of = {"rotary": rotary, "allowed": allowed}
    check_gradients(built(**how), lambda m, x: m(x, rotary, mask=mask), (X,), **of)


LENGTHS, KEYS = np.asarray([0, 4]), np.arange(T)[None, None, None]
MASKS = {
    "causal": (masks.Causal(), np.tril(np.ones((T, T), bool))),
    "padding": (masks.KeyPadding(LENGTHS), LENGTHS[:, None, None, None] > KEYS),
    "array": (np.tril(np.ones((T, T), bool), 2), np.tril(np.ones((T, T), bool), 2)),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_and_biases_reach_the_attention(name: str) -> None:
    (mask, allowed), module = MASKS[name], built()
    bias = RNG.standard_normal((1, N, T, T)).astype(np.float32)
    got = compiled(module, X, mask=mask, bias=jnp.asarray(bias))
    of = {"allowed": allowed, "bias": np.float64(bias)}
    np.testing.assert_allclose(
        got, called(params_of(module), module, np.float64(X), **of), atol=1e-5
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_low_precision_keeps_its_dtype(dtype: Any) -> None:
    module = built(qk_norm="rms_norm", dtype=dtype)
    y = compiled(module, jnp.asarray(X, dtype), ROPE)
    want = called(params_of(module), module, np.float64(X), rotary=ROPE)
    assert y.dtype == dtype and module.to_q.kernel.get_value().dtype == jnp.float32
    np.testing.assert_allclose(np.float64(y), want, atol=0.06 if dtype == jnp.bfloat16 else 0.01)


def test_keys_may_have_positions_of_their_own() -> None:
    module, both = built(), rope_1d(H, 2 * T)
    early, late = both.split(T)
    same = module(X, early)
    np.testing.assert_allclose(module(X, late), same, atol=1e-5)  # only distances count
    got = module(X, late, rotary_emb_k=early)
    want = called(params_of(module), module, np.float64(X), rotary=late, rotary_k=early)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(got - same).max() > 1e-2


def test_wans_spelling_of_positions() -> None:
    module, positions = built(), rope_3d(H, 3, 2, 2)
    frequencies = (positions.cos + 1j * positions.sin)[None, None]
    np.testing.assert_array_equal(module(X, frequencies), module(X, positions))


# ---- parameters, meshes, scopes ------------------------------------------------------------------


def test_parameters_have_the_names_and_shapes_of_checkpoints() -> None:
    module = built(qk_norm="rms_norm_across_heads", kv_heads=2, bias=True)
    assert jax.tree.map(lambda a: a.shape, params_of(module)) == {
        "to_q": {"kernel": (20, 24), "bias": (24,)}, "to_k": {"kernel": (20, 12), "bias": (12,)},
        "to_v": {"kernel": (20, 12), "bias": (12,)}, "to_out": {"kernel": (24, 20), "bias": (20,)},
        "norm_q": {"scale": (24,)}, "norm_k": {"scale": (12,)},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("how", "rotary", "axes", "kind"),
    [
        ({"gate": "per_head", "out_proj": False}, table(H // 2, B, T, N), "data tensor context",
         "Auto"),
        ({"gate": "per_channel", "qk_norm": "zero_centred_rms_norm"},
         table(H // 2 - 1, B, T, style="half", partial=True), "fsdp tensor context", "Explicit"),
    ],
)  # fmt: skip
def test_settings_on_a_mesh(how: dict[str, Any], rotary: Any, axes: str, kind: str) -> None:
    names = tuple(axes.split())
    mesh = jax.make_mesh((2, 2, 2), names, (getattr(jax.sharding.AxisType, kind),) * 3)
    one, placed = built(**how), built(**how, mesh=mesh)
    ma.sharding.place(placed, mesh)
    spec = jax.sharding.PartitionSpec(names[0])
    x = jax.device_put(X, jax.sharding.NamedSharding(mesh, spec))
    got = jax.jit(lambda x: placed(x, rotary_emb=rotary))(x)
    np.testing.assert_allclose(got, compiled(one, X, rotary_emb=rotary), atol=1e-5)


def test_dropout_is_on_the_output_alone() -> None:
    module = built(dropout=0.25)
    kept = np.asarray(module(X, deterministic=True))
    dropped, again, other = (
        np.asarray(module(X, deterministic=False, rngs=nnx.Rngs(dropout=seed)))
        for seed in (3, 3, 4)
    )
    zero = dropped == 0.0
    assert 0.15 < zero.mean() < 0.35
    np.testing.assert_allclose(dropped[~zero], (kept / 0.75)[~zero], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(dropped, again)
    assert (dropped != other).any()


def test_named_scopes_are_there_when_asked_for() -> None:
    names = ("maxattn/to_qkv", "maxattn/norm", "maxattn/rope", "maxattn/to_out")
    for on in (True, False):
        module = built(config=ma.AttentionConfig(enable_jax_named_scopes=on), qk_norm="rms_norm")
        text = jax.jit(lambda x, m=module: m(x, ROPE)).lower(X).as_text(debug_info=True)
        # A scope stands behind the function's name; a file's path may hold the same words.
        assert [f"jit(<lambda>)/{name}/" in text for name in names] == [on] * 4


# ---- heads that are not split --------------------------------------------------------------------


def test_a_head_is_a_run_of_neighbouring_channels() -> None:
    x = jnp.arange(12).reshape(1, 2, 6)
    heads = split_heads(x, 2)
    assert heads.tolist() == [[[[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9, 10, 11]]]]
    np.testing.assert_array_equal(merge_heads(heads), x)


@pytest.mark.parametrize("kv_heads", [None, 2, 1])
def test_flat_attention_is_attention_of_split_heads(kv_heads: int | None) -> None:
    n, k, h, t = 4, kv_heads or 4, 6, 9
    q, key, v = (RNG.standard_normal((2, t, width)) for width in (n * h, k * h, k * h))
    split = q.reshape(2, t, n, h), key.reshape(2, t, k, h), v.reshape(2, t, k, h)
    want = attend(*split, allowed=np.tril(np.ones((t, t), bool)), scale=0.4).reshape(2, t, n * h)
    flat = (jnp.asarray(a, jnp.float32) for a in (q, key, v))
    got = attention_flat(*flat, heads=n, kv_heads=kv_heads, mask=masks.Causal(), scale=0.4)
    np.testing.assert_allclose(got, want, atol=2e-6)
