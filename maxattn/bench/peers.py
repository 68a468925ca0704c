"""Other libraries' attention, called bare as their documentation says: what `auto` is measured against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

Attend = Callable[[Array, Array, Array], Array]


def _jax_cudnn() -> Attend:
    return lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn")


def _transformer_engine() -> Attend:
    from transformer_engine.jax.attention import (
        AttnBiasType,
        AttnMaskType,
        AttnSoftmaxType,
        QKVLayout,
        SequenceDescriptor,
        fused_attn,
    )
    from transformer_engine.jax.sharding import MeshResource, global_shard_guard

    def attend(q: Array, k: Array, v: Array) -> Array:
        lengths = tuple(jnp.full(x.shape[0], x.shape[1], jnp.int32) for x in (q, k))
        with global_shard_guard(MeshResource()):
            return fused_attn(
                (q, k, v), None, SequenceDescriptor.from_seqlens(lengths), None, AttnBiasType.NO_BIAS,
                AttnMaskType.NO_MASK, QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX,
                q.shape[3] ** -0.5, 0.0, True,
            )  # fmt: skip

    return attend


def _tokamax() -> Attend:
    import tokamax

    return lambda q, k, v: tokamax.dot_product_attention(q, k, v, implementation="mosaic")


def _fa4_jax() -> Attend:
    from fa4_jax import flash_attn

    def attend(q: Array, k: Array, v: Array) -> Any:
        return flash_attn(q, k, v)

    return attend


PEERS: dict[str, Callable[[], Attend]] = {
    "jax cuDNN": _jax_cudnn,
    "TransformerEngine": _transformer_engine,
    "tokamax": _tokamax,
    "fa4-jax": _fa4_jax,
}
