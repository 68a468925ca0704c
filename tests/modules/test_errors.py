"""Refusals of the modules, before anything is traced; messages: golden/modules.txt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn.errors import MaxattnError
from maxattn.modules import (
    KV,
    CrossAttention,
    FlaxAttention,
    JointAttention,
    attention_flat,
    attention_fn,
    split_heads,
    swap,
)
from maxattn.rope import Rotary, rope_1d
from tests.golden_text import check_refused
from tests.torch_tensor import torch_tensor

RNGS, NO_DROPOUT = nnx.Rngs(0), nnx.Rngs(params=1)
X = np.zeros((2, 5, 12), np.float32)
HEADS = np.zeros((2, 5, 2, 4), np.float32)
TEXT, IMAGE = np.zeros((2, 3, 8), np.float32), np.zeros((2, 4, 6), np.float32)


SIZES: dict[str, Any] = {"query_dim": 12, "heads": 2, "dim_head": 4, "rngs": RNGS}


def attn(**how: Any) -> FlaxAttention:
    return FlaxAttention(**(SIZES | how))


def joint(**how: Any) -> JointAttention:
    return JointAttention(**(SIZES | how))


def cross(**how: Any) -> CrossAttention:
    return CrossAttention(**(SIZES | {"cross_attention_dim": 8} | how))


def with_image(image: Any = None, **how: Any) -> Any:
    return cross(added_kv_proj_dim=6)(X, TEXT, encoder_hidden_states_image=image, **how)


def text_kv(**how: Any) -> Any:
    """Call with valid keys and values of a text, except for the replaced ones."""
    return cross()(X, kv=cross().compute_kv(TEXT)._replace(**how))


def image_kv(**how: Any) -> Any:
    module = cross(added_kv_proj_dim=6)
    return module(X, kv=module.compute_kv(TEXT, IMAGE)._replace(**how))


def fn(key: Any = HEADS, query: Any = HEADS, rope: Any = None, **how: Any) -> Any:
    return attention_fn(rope=rope)(query, key, key, **how)


def dropping(**how: Any) -> Any:
    module = attn(dropout=0.1)
    module.train()
    return module(X, **how)


BAD: dict[str, Callable[[], Any]] = {
    "heads_zero": lambda: attn(heads=0),
    "heads_float": lambda: attn(heads=2.0),
    "kv_heads": lambda: attn(heads=8, kv_heads=3),
    "dim_head": lambda: attn(dim_head=-4),
    "query_dim": lambda: attn(query_dim=0),
    "cross_attention_dim": lambda: cross(cross_attention_dim=0),
    "added_kv_proj_dim": lambda: cross(added_kv_proj_dim=0),
    "dropout": lambda: attn(dropout=1.0),
    "eps": lambda: attn(eps=0.0),
    "qk_norm": lambda: attn(qk_norm="rms_norm_across_head"),
    "qk_norm_of_another_kind": lambda: attn(qk_norm="batch"),
    "gate": lambda: attn(gate="per_heads"),
    "gate_true": lambda: cross(gate=True),
    "out_proj": lambda: attn(out_proj="no"),
    "out_dim_without_projection": lambda: cross(out_proj=False, out_dim=12),
    "text_out": lambda: joint(text_out=None),
    "joint_added_kv_proj_dim": lambda: joint(added_kv_proj_dim=0),
    "joint_text_width": lambda: joint(added_kv_proj_dim=8)(X, X),
    "joint_text_batch": lambda: joint(added_kv_proj_dim=8)(X, TEXT[:1]),
    "joint_rotary_length": lambda: joint(added_kv_proj_dim=8)(X, TEXT, rope_1d(4, 5)),
    "dtype": lambda: attn(dtype=np.float64),
    "param_dtype": lambda: attn(param_dtype=jnp.int8),
    "config": lambda: attn(config={"attention": "dot_product"}),
    "attention_fn_config": lambda: attention_fn("dot_product"),  # type: ignore[arg-type]
    "states_rank": lambda: attn()(X[0]),
    "states_list": lambda: attn()(X.tolist()),
    "states_width": lambda: attn()(X[..., :7]),
    "states_float64": lambda: attn()(X.astype(np.float64)),
    "states_of_torch": lambda: attn()(torch_tensor(X.shape)),
    "cross_states_of_torch": lambda: cross()(X, torch_tensor(TEXT.shape, "bfloat16")),
    "states_integer": lambda: attn()(X.astype(np.int32)),
    "dropout_without_rngs": lambda: dropping(deterministic=False),
    "deterministic_text": lambda: dropping(deterministic="no"),
    "deterministic_traced": lambda: nnx.jit(lambda m, off: m(X, deterministic=off))(attn(), True),
    "rotary_odd_head": lambda: attn(dim_head=5)(X, rope_1d(4, 5)),
    "rotary_length": lambda: attn()(X, rope_1d(4, 6)),
    "rotary_of_other_heads": lambda: attn()(X, Rotary(*np.ones((2, 1, 5, 3, 2)))),
    "rotary_of_query_heads": lambda: attn(kv_heads=1)(X, Rotary(*np.ones((2, 1, 5, 2, 2)))),
    "rotary_partial_of_all": lambda: attn()(X, Rotary(*np.ones((2, 5, 2)), partial=True)),
    "rotary_k_width": lambda: attn()(X, rope_1d(4, 5), rotary_emb_k=rope_1d(6, 5)),
    "mask_shape": lambda: attn()(X, mask=np.ones((4, 4), bool)),
    "mask_float": lambda: attn()(X, mask=np.ones((5, 5), np.float32)),
    "bias_shape": lambda: attn()(X, bias=np.ones((1, 3, 5, 5), np.float32)),
    "cross_without_states": lambda: cross()(X),
    "cross_with_both": lambda: cross()(X, TEXT, kv=cross().compute_kv(TEXT)),
    "cross_width": lambda: cross()(X, X),
    "cross_batch": lambda: cross()(X, TEXT[:1]),
    "cross_image_missing": with_image,
    "cross_image_unasked": lambda: cross()(X, TEXT, encoder_hidden_states_image=IMAGE),
    "cross_image_batch": lambda: with_image(IMAGE[:1]),
    "cross_image_width": lambda: with_image(TEXT),
    "cross_dropout_without_rngs": lambda: cross(dropout=0.1)(X, TEXT, deterministic=False),
    "cross_mask_shape": lambda: cross()(X, TEXT, mask=np.ones((5, 5), bool)),
    "cross_rotary_k_length": lambda: cross()(X, TEXT, rotary_emb_k=rope_1d(4, 5)),
    "kv_mask_shape": lambda: cross()(X, kv=cross().compute_kv(TEXT), mask=np.ones((5, 5)) > 0),
    "kv_type": lambda: cross()(X, kv=(TEXT, TEXT)),
    "kv_batch": lambda: cross()(X, kv=cross().compute_kv(TEXT[:1])),
    "kv_heads_of_another_module": lambda: cross()(X, kv=cross(heads=4).compute_kv(TEXT)),
    "kv_without_image": lambda: cross(added_kv_proj_dim=6)(X, kv=cross().compute_kv(TEXT)),
    "kv_without_k": lambda: text_kv(k=None),
    "kv_of_lists": lambda: text_kv(v=[[1.0]]),
    "kv_v_of_another_length": lambda: text_kv(v=np.zeros((2, 2, 2, 4), np.float32)),
    "kv_of_another_dtype": lambda: cross(dtype=jnp.bfloat16)(X, kv=cross().compute_kv(TEXT)),
    "kv_without_image_v": lambda: image_kv(image_v=None),
    "kv_without_image_k": lambda: image_kv(image_k=None),
    "kv_image_of_another_length": lambda: image_kv(image_v=np.zeros((2, 3, 2, 4), np.float32)),
    "cross_image_no_array": lambda: cross()(X, TEXT, encoder_hidden_states_image="cat"),  # type: ignore[arg-type]
    "kv_flat": lambda: cross()(X, kv=KV(TEXT, TEXT)),
    "kv_and_rotary_k": lambda: cross()(X, kv=cross().compute_kv(TEXT), rotary_emb_k=rope_1d(4, 3)),
    "compute_kv_width": lambda: cross().compute_kv(X),
    "rngs_none": lambda: attn(rngs=None),
    "rngs_number": lambda: cross(rngs=0),
    "rngs_without_params": lambda: attn(rngs=nnx.Rngs(dropout=0)),
    "dropout_rngs_number": lambda: dropping(deterministic=False, rngs=0),
    "dropout_rngs_without_dropout": lambda: dropping(deterministic=False, rngs=NO_DROPOUT),
    "dropout_after_train": lambda: dropping(),
    "dropout_after_train_without_dropout": lambda: dropping(rngs=NO_DROPOUT),
    "dropout_text": lambda: attn(dropout="0.1"),
    "eps_text": lambda: attn(eps="1e-5"),
    "dtype_short": lambda: attn(dtype="bf16"),
    "param_dtype_none": lambda: attn(param_dtype=None),
    "scale_nan": lambda: attn(scale=float("nan")),
    "scale_zero": lambda: cross(scale=0.0),
    "scale_text": lambda: attn(scale="half"),
    "precision": lambda: attn(precision="hi"),
    "precision_number": lambda: joint(precision=3),
    "mesh_text": lambda: attn(mesh="x"),
    "mesh_sizes": lambda: attn(mesh={"context": 4}),
    "mesh_of_other_axes": lambda: cross(
        mesh=jax.make_mesh((2,), ("dp",), devices=jax.devices()[:2])
    ),
    "attention_fn_mesh": lambda: attention_fn(mesh="x"),  # type: ignore[arg-type]
    "attention_fn_role": lambda: attention_fn(role="joint"),  # type: ignore[arg-type]
    "attention_fn_key": lambda: fn(HEADS[:1]),
    "attention_fn_query": lambda: fn(query=HEADS[0, 0]),
    "attention_fn_mask": lambda: fn(mask=np.ones((3, 1, 5, 5))),
    "attention_fn_bias": lambda: fn(bias=np.ones((5, 2, 1, 5, 5))),
    "attention_fn_rope": lambda: fn(rope=7),
    "positions_without_rope": lambda: fn(input_positions=np.arange(5)),
    "positions_of_other_keys": lambda: fn(HEADS[:, :3], rope=abs, input_positions=np.arange(5)),
    "positions_length": lambda: fn(rope=abs, input_positions=np.arange(3)),
    "positions_batch": lambda: fn(rope=abs, input_positions=np.ones((3, 5))),
    "flat_heads": lambda: attention_flat(X, X, X, heads=5),
    "split_of_two_axes": lambda: split_heads(X[0], 2),
    "swap_mesh": lambda: swap(attn(), mesh={"context": 4}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_setting_value_rule_and_remedy(name: str) -> None:
    check_refused(f"modules/{name}", MaxattnError, BAD[name])


def test_what_jax_takes_as_a_precision_is_taken() -> None:
    for precision in ("default", "highest", jax.lax.Precision.HIGH, ("high", "default"), None):
        assert nnx.eval_shape(lambda m: m(X), attn(precision=precision)).shape == X.shape


BEFORE = (
    "states_width", "rotary_length", "rotary_odd_head", "mask_shape", "bias_shape",
    "cross_without_states", "cross_image_unasked", "cross_mask_shape", "cross_rotary_k_length",
    "kv_mask_shape", "kv_v_of_another_length",
)  # fmt: skip


@pytest.mark.parametrize("name", BEFORE)
def test_nothing_is_computed_before_a_refusal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values that a case is given are two projections."""
    runs, linear = [], nnx.Linear.__call__
    monkeypatch.setattr(nnx.Linear, "__call__", lambda *of: (runs.append(1), linear(*of))[1])
    with pytest.raises(MaxattnError):
        BAD[name]()
    assert len(runs) == (2 if name.startswith("kv") else 0)
