"""Attention of other libraries, called as their documentation shows, to compare with ours."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Attend = Callable[[Array, Array, Array], Array]


def _transformer_engine() -> Attend:
    modules = (f"transformer_engine.jax.{name}" for name in ("attention", "sharding"))
    te, sharding = map(import_module, modules)
    fused = te_attention(te)

    def attend(q: Array, k: Array, v: Array) -> Array:
        with sharding.global_shard_guard(sharding.MeshResource()):
            return fused(q, k, v)

    return attend


def te_attention(te: Any, **settings: Any) -> Attend:
    """Return TransformerEngine's `fused_attn` without a mask; `settings` are passed to it."""

    def attend(q: Array, k: Array, v: Array) -> Array:
        lengths = tuple(jnp.full(x.shape[0], x.shape[1], jnp.int32) for x in (q, k))
        sequences = te.SequenceDescriptor.from_seqlens(lengths)
        kinds = te.AttnBiasType.NO_BIAS, te.AttnMaskType.NO_MASK, te.QKVLayout.BSHD_BSHD_BSHD
        softmax, scale = te.AttnSoftmaxType.VANILLA_SOFTMAX, q.shape[3] ** -0.5
        # Arguments: no bias, no seed, no dropout, training.
        rest = (None, sequences, None, *kinds, softmax, scale, 0.0, True)
        return te.fused_attn((q, k, v), *rest, **settings)

    return attend


def _dot_product_attention(of: Any, implementation: str) -> Attend:
    return lambda q, k, v: of.dot_product_attention(q, k, v, implementation=implementation)


PEERS: dict[str, Callable[[], Attend]] = {
    "jax cuDNN": lambda: _dot_product_attention(jax.nn, "cudnn"),
    "TransformerEngine": _transformer_engine,
    "tokamax": lambda: _dot_product_attention(import_module("tokamax"), "mosaic"),
    "fa4-jax": lambda: import_module("fa4_jax").flash_attn,
}
