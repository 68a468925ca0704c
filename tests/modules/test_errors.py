"""What the modules refuse, before anything is traced; the messages are in tests/golden/modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxattn.errors import MaxattnError
from maxattn.modules import KV, CrossAttention, FlaxAttention, attention_fn
from maxattn.rope import rope_1d
from tests.modules.reference import check_golden

RNGS = nnx.Rngs(0)
X = np.zeros((2, 5, 12), np.float32)
TEXT, IMAGE = np.zeros((2, 3, 8), np.float32), np.zeros((2, 4, 6), np.float32)


def attn(**how: Any) -> FlaxAttention:
    return FlaxAttention(**{"query_dim": 12, "heads": 2, "dim_head": 4, "rngs": RNGS, **how})


def cross(**how: Any) -> CrossAttention:
    return CrossAttention(**{"query_dim": 12, "cross_attention_dim": 8, "heads": 2, "dim_head": 4, "rngs": RNGS, **how})


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
    "dtype": lambda: attn(dtype=np.float64),
    "param_dtype": lambda: attn(param_dtype=jnp.int8),
    "config": lambda: attn(config={"attention": "dot_product"}),
    "attention_fn_config": lambda: attention_fn("dot_product"),  # type: ignore[arg-type]
    "states_rank": lambda: attn()(X[0]),
    "states_list": lambda: attn()(X.tolist()),
    "states_width": lambda: attn()(X[..., :7]),
    "states_float64": lambda: attn()(X.astype(np.float64)),
    "states_integer": lambda: attn()(X.astype(np.int32)),
    "dropout_without_rngs": lambda: attn(dropout=0.1)(X, deterministic=False),
    "rotary_odd_head": lambda: attn(dim_head=5)(X, rope_1d(4, 5)),
    "rotary_length": lambda: attn()(X, rope_1d(4, 6)),
    "rotary_k_width": lambda: attn()(X, rope_1d(4, 5), rotary_emb_k=rope_1d(6, 5)),
    "mask_shape": lambda: attn()(X, mask=np.ones((4, 4), bool)),
    "mask_float": lambda: attn()(X, mask=np.ones((5, 5), np.float32)),
    "bias_shape": lambda: attn()(X, bias=np.ones((1, 3, 5, 5), np.float32)),
    "cross_without_states": lambda: cross()(X),
    "cross_with_both": lambda: cross()(X, TEXT, kv=cross().compute_kv(TEXT)),
    "cross_width": lambda: cross()(X, X),
    "cross_batch": lambda: cross()(X, TEXT[:1]),
    "cross_image_missing": lambda: cross(added_kv_proj_dim=6)(X, TEXT),
    "cross_image_unasked": lambda: cross()(X, TEXT, encoder_hidden_states_image=IMAGE),
    "cross_image_batch": lambda: cross(added_kv_proj_dim=6)(X, TEXT, encoder_hidden_states_image=IMAGE[:1]),
    "cross_image_width": lambda: cross(added_kv_proj_dim=6)(X, TEXT, encoder_hidden_states_image=TEXT),
    "cross_dropout_without_rngs": lambda: cross(dropout=0.1)(X, TEXT, deterministic=False),
    "kv_type": lambda: cross()(X, kv=(TEXT, TEXT)),
    "kv_batch": lambda: cross()(X, kv=cross().compute_kv(TEXT[:1])),
    "kv_heads_of_another_module": lambda: cross()(X, kv=cross(heads=4).compute_kv(TEXT)),
    "kv_without_image": lambda: cross(added_kv_proj_dim=6)(X, kv=cross().compute_kv(TEXT)),
    "kv_flat": lambda: cross()(X, kv=KV(TEXT, TEXT)),
    "kv_and_rotary_k": lambda: cross()(X, kv=cross().compute_kv(TEXT), rotary_emb_k=rope_1d(4, 3)),
    "compute_kv_width": lambda: cross().compute_kv(X),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_setting_value_rule_and_remedy(name: str) -> None:
    with pytest.raises(MaxattnError) as caught:
        BAD[name]()
    check_golden(name, str(caught.value))


def test_nothing_is_computed_before_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    made, text_kv = {"attn": attn(), "odd": attn(dim_head=5), "cross": cross()}, cross().compute_kv(TEXT)

    def computed(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a projection ran")

    monkeypatch.setattr(nnx.Linear, "__call__", computed)
    for call in (
        lambda: made["attn"](X[..., :7]),
        lambda: made["attn"](X, rope_1d(4, 6)),
        lambda: made["odd"](X, rope_1d(4, 5)),
        lambda: made["attn"](X, mask=np.ones((4, 4), bool)),
        lambda: made["attn"](X, bias=np.ones((1, 3, 5, 5), np.float32)),
        lambda: made["cross"](X),
        lambda: made["cross"](X, TEXT, encoder_hidden_states_image=IMAGE),
        lambda: made["cross"](X, TEXT, mask=np.ones((5, 5), bool)),
        lambda: made["cross"](X, kv=text_kv, mask=np.ones((5, 5), bool)),
        lambda: made["cross"](X, TEXT, rotary_emb_k=rope_1d(4, 5)),
    ):
        with pytest.raises(MaxattnError):
            call()
    with pytest.raises(AssertionError):
        made["attn"](X)
