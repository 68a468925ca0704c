"""`CrossAttention` against an independent version in float64; `compute_kv` against the call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn import masks
from maxattn.modules import CrossAttention
from maxattn.rope import rope_1d
from tests.modules.reference import (
    called,
    check_gradients,
    compiled,
    norm,
    params_of,
    randomise,
    turn,
)
from tests.waiting import but

RNG = np.random.default_rng(3)
B, T, S, I, C, D, E, N, H = 2, 12, 7, 5, 20, 11, 9, 4, 6
X, TEXT, IMAGE = (
    RNG.standard_normal(shape).astype(np.float32) for shape in ((B, T, C), (B, S, D), (B, I, E))
)
X64, TEXT64, IMAGE64 = np.float64(X), np.float64(TEXT), np.float64(IMAGE)


def built(image: bool = False, **how: Any) -> CrossAttention:
    how = {"heads": N, "dim_head": H, "bias": True, "eps": 1e-3, "rngs": nnx.Rngs(0)} | how
    return randomise(CrossAttention(C, D, added_kv_proj_dim=E if image else None, **how))


keys_of = nnx.jit(CrossAttention.compute_kv)
WAYS = [
    (False, {}),
    (False, {"qk_norm": "rms_norm"}),
    (True, {"qk_norm": "rms_norm_across_heads", "kv_heads": 2}),
    (True, {"qk_norm": "layer_norm"}),
    (False, {"out_proj": False}),
    (False, {"gate": "per_head"}),
    (True, {"gate": "per_channel", "kv_heads": 2}),
]


@pytest.mark.parametrize(("image", "how"), but(WAYS, WAYS[3:]))
def test_output(image: bool, how: dict[str, Any]) -> None:
    """With a text, with an image beside it, and with precomputed keys and values."""
    module, picture = built(image, **how), IMAGE if image else None
    got = compiled(module, X, TEXT, encoder_hidden_states_image=picture)
    want = called(params_of(module), module, X64, TEXT64, IMAGE64 if image else None)
    np.testing.assert_allclose(got, want, atol=1e-5)
    kv = keys_of(module, TEXT, picture)
    assert kv.k.shape == kv.v.shape == (B, S, module.kv_heads, H)
    assert len(jax.tree.leaves(kv)) == (4 if image else 2)
    np.testing.assert_allclose(compiled(module, X, kv=kv), got, atol=1e-6)


GRADIENTS = [{"qk_norm": "rms_norm_across_heads", "kv_heads": 2}, {"gate": "per_channel"}]


@pytest.mark.parametrize("how", but(GRADIENTS, GRADIENTS[:1]))
def test_gradients(how: dict[str, Any]) -> None:
    def call(module: Any, x: Any, text: Any, image: Any) -> Any:
        return module(x, text, encoder_hidden_states_image=image)

    check_gradients(built(True, **how), call, (X, TEXT, IMAGE))


def test_the_text_mask_leaves_the_image_alone() -> None:
    module, lengths = built(True), np.asarray([3, 0])
    allowed = np.arange(S)[None, None, None] < lengths[:, None, None, None]
    want = called(params_of(module), module, X64, TEXT64, IMAGE64, allowed=allowed)
    mask = masks.KeyPadding(jnp.asarray(lengths))
    got = compiled(module, X, TEXT, encoder_hidden_states_image=IMAGE, mask=mask)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(got[1]).max() > 0.1  # no text at all, and the image is still seen


def test_positions_of_queries_and_keys_are_separate() -> None:
    module, q_table, k_table = built(), rope_1d(H, T), rope_1d(H, S)
    for of_keys in (None, k_table):
        got = compiled(module, X, TEXT, rotary_emb=q_table, rotary_emb_k=of_keys)
        tables = {"rotary": q_table, "rotary_k": of_keys}
        want = called(params_of(module), module, X64, TEXT64, **tables)
        np.testing.assert_allclose(got, want, atol=1e-5)
        kept = keys_of(module, TEXT, rotary_emb_k=of_keys)
        out = compiled(module, X, kv=kept, rotary_emb=q_table)
        np.testing.assert_allclose(out, got, atol=1e-6)


@pytest.mark.slow
def test_norm_and_angles_are_rounded_once() -> None:
    """Keys are within half a step of bfloat16 of float64's, computed from the projection."""
    low = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    module, rotary = built(qk_norm="rms_norm", **low), rope_1d(H, S)
    text = jnp.asarray(TEXT, jnp.bfloat16)
    got = module.compute_kv(text, rotary_emb_k=rotary).k
    y = np.asarray(module.to_k(text), np.float64)
    want = turn(norm(module, params_of(module)["norm_k"], y, N), rotary)
    _, exponent = np.frexp(want)
    steps = np.abs(np.asarray(got, np.float64) - want) / 2.0 ** (exponent - 8)
    assert got.dtype == jnp.bfloat16 and steps.max() < 0.501


def test_parameters_have_the_names_and_shapes_of_checkpoints() -> None:
    module = built(True, qk_norm="rms_norm_across_heads", bias=False)
    assert jax.tree.map(lambda a: a.shape, params_of(module)) == {
        "to_q": {"kernel": (20, 24)}, "to_k": {"kernel": (11, 24)}, "to_v": {"kernel": (11, 24)},
        "to_out": {"kernel": (24, 20), "bias": (20,)},
        "add_k_proj": {"kernel": (9, 24)}, "add_v_proj": {"kernel": (9, 24)},
        "norm_q": {"scale": (24,)}, "norm_k": {"scale": (24,)}, "norm_added_k": {"scale": (24,)},
    }  # fmt: skip
    as_wide = CrossAttention(C, heads=N, dim_head=H, rngs=nnx.Rngs(0))
    assert as_wide.to_k.kernel.get_value().shape == (C, N * H)
