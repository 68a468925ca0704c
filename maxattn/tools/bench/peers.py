"""Other libraries' attention, called bare as their documentation says: what `auto` is measured
against.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Attend = Callable[[Array, Array, Array], Array]


def _jax_cudnn() -> Attend:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def _transformer_engine() -> Attend:
    te, sharding = (
        import_module(f"transformer_engine.jax.{name}") for name in ("attention", "sharding")
    )

    def attend(q: Array, k: Array, v: Array) -> Array:
        lengths = tuple(jnp.full(x.shape[0], x.shape[1], jnp.int32) for x in (q, k))
        with sharding.global_shard_guard(sharding.MeshResource()):
            return te.fused_attn(
                (q, k, v),
                None,
                te.SequenceDescriptor.from_seqlens(lengths),
                None,
                te.AttnBiasType.NO_BIAS,
                te.AttnMaskType.NO_MASK,
                te.QKVLayout.BSHD_BSHD_BSHD,
                te.AttnSoftmaxType.VANILLA_SOFTMAX,
                q.shape[3] ** -0.5,
                0.0,
                True,
            )

    return attend


def _tokamax() -> Attend:
    tokamax = import_module("tokamax")

    return lambda q, k, v: tokamax.dot_product_attention(q, k, v, implementation="mosaic")


def _fa4_jax() -> Attend:
    flash_attn = import_module("fa4_jax").flash_attn

    def attend(q: Array, k: Array, v: Array) -> Any:
        return flash_attn(q, k, v)

    return attend


PEERS: dict[str, Callable[[], Attend]] = {
    "jax cuDNN": _jax_cudnn,
    "TransformerEngine": _transformer_engine,
    "tokamax": _tokamax,
    "fa4-jax": _fa4_jax,
}
