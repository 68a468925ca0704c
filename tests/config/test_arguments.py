"""Arguments of flax, jax, torch and diffusers raise one error that names maxattn's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.config.arguments import _OURS, ADVICE, RENAMED, ArgumentError
from maxattn.errors import InputError
from maxattn.modules import attention_flat

X = np.ones((1, 4, 2, 8), np.float32)
STATES = np.ones((1, 4, 16), np.float32)
SIZES: dict[str, Any] = {"query_dim": 16, "heads": 2, "dim_head": 8, "rngs": nnx.Rngs(0)}
LAYER, CROSS = ma.FlaxAttention(**SIZES), ma.CrossAttention(**SIZES)

ASKED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "nnx module": (
        lambda **how: ma.FlaxAttention(rngs=nnx.Rngs(0), **how),
        {"num_heads": 2, "in_features": 16, "qkv_features": 16, "out_features": 4},
        "num_heads: write heads=; in_features: write query_dim=; qkv_features: set heads and"
        " dim_head, whose product it is; out_features: write out_dim=",
    ),
    "head_dim": (lambda **how: ma.CrossAttention(16, **how), {"head_dim": 8}, "write dim_head="),
    "joint": (lambda **how: ma.JointAttention(16, **how), {"dropout_rate": 0.1}, "write dropout="),
    "mode": (lambda **how: ma.FlaxAttention(16, **how), {"deterministic": True}, "leave it out"),
    "call": (lambda **how: LAYER(STATES, **how), {"image_rotary_emb": 0}, "write rotary_emb="),
    "mask": (lambda **how: LAYER(STATES, **how), {"attention_mask": None}, "write mask="),
    "train": (lambda **how: LAYER(STATES, **how), {"train": True}, "write deterministic=not train"),
    "causal": (lambda **how: ma.attention(X, X, X, **how), {"is_causal": True}, "Causal(0)"),
    "keys": (lambda **how: ma.attention(**how), {"query": X, "key": X, "value": X}, "key: write k"),
    "lengths": (
        lambda **how: ma.attention(X, X, X, **how),
        {"key_value_seq_lengths": 3, "local_window_size": 1},
        "pass mask=ma.masks.LocalWindow(left, right, 0)",
    ),
    "dropout": (lambda **how: ma.attention(X, X, X, **how), {"dropout_rate": 0.1}, "nnx.Dropout"),
    "adapter": (lambda **how: ma.attention_fn()(X, X, X, **how), {"sm_scale": 1}, "or use one"),
    "its config": (ma.attention_fn, {"implementation": "cudnn"}, "AttentionConfig(attention="),
    "two sequences": (
        lambda **how: LAYER(**how),
        {"query": STATES, "key": STATES, "value": STATES},
        "query: write hidden_states=; key, value: use ma.CrossAttention for keys of another",
    ),
    "diffusers call": (lambda **how: LAYER(STATES, **how), {"encoder_hidden_states": 0}, "use ma"),
    "of torch": (lambda **how: CROSS(STATES, **how), {"key": 0, "value": 0}, "write encoder_"),
    "diffusers": (
        lambda **how: ma.FlaxAttention(16, **how),
        {"cross_attention_dim": 8, "added_kv_proj_dim": 8, "pre_only": 1, "upcast_softmax": 1},
        "cross_attention_dim, added_kv_proj_dim: use ma.CrossAttention for keys of another"
        " sequence, ma.JointAttention if both attend; pre_only: pass out_proj=False; upcast_soft",
    ),
    "flax": (
        lambda **how: ma.FlaxAttention(16, **how),
        {"use_bias": True, "normalize_qk": True},
        "use_bias: write bias= and out_bias=; normalize_qk: write qk_norm='layer_norm'",
    ),
    "settings": (
        lambda **how: ma.FlaxAttention(16, **how),
        {"flash_block_sizes": {}, "attention_kernel": "flash"},
        "flash_block_sizes: set it in the config: ma.AttentionConfig(flash_block_sizes=...)",
    ),
    "changes of scores": (
        lambda **how: ma.attention(X, X, X, **how),
        {"attn_logits_soft_cap": 20.0, "sinks": 1},
        "keep this layer's own attention",
    ),
    "swap": (lambda **how: ma.swap(LAYER, **how), {"confg": None}, "did you mean 'config'?"),
    "flat": (lambda **how: attention_flat(X, X, X, **how), {"num_heads": 2}, "write heads="),
}  # fmt: skip


@pytest.mark.parametrize("asked", ASKED)
def test_a_foreign_name_is_answered_with_ours(asked: str) -> None:
    function, given, remedy = ASKED[asked]
    with pytest.raises(ArgumentError) as caught:
        function(**given)
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, InputError)
    assert caught.value.setting == ", ".join(given) and remedy in caught.value.remedy


def test_sizes_that_others_put_elsewhere_are_passed_by_name() -> None:
    for module in (ma.FlaxAttention, lambda *sizes, **how: ma.CrossAttention(16, *sizes, **how)):
        with pytest.warns(DeprecationWarning, match="pass kv_heads= by name"):
            assert module(16, 8, 8, rngs=nnx.Rngs(0)).dim_head == 64
        with pytest.warns(DeprecationWarning), pytest.raises(InputError) as caught:
            module(16, 2, 64, rngs=nnx.Rngs(0))
        assert "dim_head=" in caught.value.remedy


KERNELS = {
    "native": "write auto, or dot_product for plain XLA", "eager": "write dot_product",
    "_native_flash": "write auto, or flash", "_native_cudnn": "write cudnn",
    "tpu_falsh": "did you mean 'tpu_flash'?",
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_of_torch_are_answered_with_ours(name: str) -> None:
    for key in ("attention", "cross_attention"):
        with pytest.raises(ma.errors.ConfigError) as caught:
            ma.AttentionConfig.from_overrides([f"{key}={name}"])
        assert KERNELS[name] in str(caught.value)


@pytest.mark.parametrize("config", ["flash", "a.yml", {"attention": "flash"}, "flsh"], ids=str)
def test_what_is_no_config_is_answered_with_how_to_make_it(config: Any) -> None:
    remedies = {
        "flash": "pass AttentionConfig(attention='flash')",
        "a.yml": "pass AttentionConfig.from_yaml('a.yml')",
        "{'attention': 'flash'}": "pass AttentionConfig(**config)",
        "flsh": "make one with AttentionConfig(...)",
    }
    for call in (lambda: ma.attention(X, X, X, config=config), lambda: ma.swap(LAYER, config)):
        with pytest.raises(ma.errors.ConfigError) as caught:
            call()
        assert caught.value.remedy.startswith(remedies[str(config)])


def test_answers_are_arguments_that_exist() -> None:
    functions = (
        ma.FlaxAttention.__init__, ma.CrossAttention.__init__, ma.attention,
        ma.FlaxAttention.__call__, ma.CrossAttention.__call__, type(ma.attention_fn()).__call__,
        ma.CrossAttention.compute_kv,
    )  # fmt: skip
    known = {name for each in functions for name in inspect.signature(each).parameters}
    assert set(RENAMED) <= known
    assert all(ours for ours in _OURS.values())
    assert all(" " in remedy for remedy in ADVICE.values())


def test_remedies_followed_work_as_jax_nn() -> None:
    q, k = (np.random.default_rng(i).standard_normal((1, t, 2, 8)) for i, t in ((0, 6), (1, 9)))
    q, k = q.astype(np.float32), k.astype(np.float32)
    masks, lengths = ma.masks, np.array([5])
    for theirs, ours in (
        ({"is_causal": True}, masks.Causal(0)),
        ({"local_window_size": (2, 1)}, masks.LocalWindow(2, 1, 0)),
        ({"key_value_seq_lengths": lengths}, masks.KeyPadding(lengths)),
    ):
        want = jax.nn.dot_product_attention(q, k, k, **theirs)  # type: ignore[arg-type]
        np.testing.assert_allclose(ma.attention(q, k, k, mask=ours), want, rtol=0, atol=2e-6)
    add = np.where(np.arange(9) < 5, 0.0, -1e9).astype(np.float32)[None]  # [B, S]
    want = jax.nn.dot_product_attention(q, k, k, key_value_seq_lengths=lengths)
    np.testing.assert_allclose(ma.attention(q, k, k, bias=add[:, None, None]), want, atol=2e-6)
