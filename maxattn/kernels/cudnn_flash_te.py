"""cuDNN's fused attention through TransformerEngine's own functions, without its Linen module.

The module would fall back in silence, ask for a mesh resource, and read the environment. Here the
resource is an empty one for the length of a call, and a mask or a window that has no fused kernel
is refused by name. Lengths go in as a sequence descriptor: a mask array, which means the opposite
there, is never made.

Source: NVIDIA TransformerEngine, transformer_engine.jax.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Lines
from maxattn.kernels.fused import masks as fused_masks
from maxattn.kernels.fused.kernel import Fused, Lengths, Pairs, refuse_shards
from maxattn.kernels.fused.pieces import Piece, pieces
from maxattn.kernels.requirements import untested
from maxattn.target import Target


@dataclass(frozen=True)
class CudnnFlashTe(Fused):
    """Compute out = softmax(scale * q k^T) v with TransformerEngine's fused attention.

    Args:
        version: of transformer-engine-jax.
    """

    name: ClassVar[str] = "cudnn_flash_te"
    version: str = ""

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse float32, head dims over 256 (128 before Hopper), a bias, and masks other than
        bands and lengths.
        """
        most = target.device.family.cudnn_head_dim
        reason = untested("cudnn_flash_te", "transformer-engine-jax", target)
        reason = reason or fused_masks.refuse_call("cudnn_flash_te", call, most)
        parts = fused_masks.split(call.mask)
        reason = (
            reason
            or fused_masks.refuse_mask("cudnn_flash_te", parts)
            or refuse_shards("cudnn_flash_te", parts, call)
        )
        return reason or _refuse_window(parts, call)

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Refuse: gradients are added up in no fixed order."""
        rule = "its backward adds gradients up in no fixed order"
        return Reason("cudnn_flash_te", "deterministic", rule, fused_masks.REMEDY)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> CudnnFlashTe:
        """Take the scale, and whether the LSE is asked for."""
        return CudnnFlashTe(
            call.scale, call.return_lse, target.version("transformer-engine-jax") or ""
        )

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        return Lines(f"cudnn_flash_te (TransformerEngine {self.version})", "the library's own")

    def piece_forward(
        self, q: Array, k: Array, v: Array, piece: Piece, lengths: Lengths
    ) -> tuple[Array, Array]:
        """Return (out, lse) of one rectangle."""
        with _no_mesh_resource():
            out, lse, _, _ = _te("cpp_extensions").fused_attn_fwd(
                (q, k, v),
                None,
                None,
                _descriptor(q, k, lengths),
                None,
                **_settings(piece, lengths, self.scale),
            )
        return out, lse[..., 0]

    def piece_backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        dout: Array,
        piece: Piece,
        lengths: Lengths,
    ) -> tuple[Array, Array, Array]:
        """Return (dq, dk, dv) of one rectangle."""
        with _no_mesh_resource():
            grads, _, _ = _te("cpp_extensions").fused_attn_bwd(
                (q, k, v),
                None,
                None,
                lse[..., None],
                _rng_state(),
                out,
                dout,
                _descriptor(q, k, lengths),
                **_settings(piece, lengths, self.scale),
            )
        dq, dk, dv = grads
        return dq, dk, dv


def _te(module: str) -> Any:
    return import_module(
        f"transformer_engine.jax.{module}"
    )  # an extra: it need not be there when this one is read


def _no_mesh_resource() -> Any:
    """Tell TransformerEngine that one device is at work: every call here is about one shard."""
    sharding = _te("sharding")
    return sharding.global_shard_guard(sharding.MeshResource())


def _rng_state() -> Array:
    """Return the state of dropout that the forward would hand on; without dropout nothing reads
    it.
    """
    checker = _te("cpp_extensions.attention")._FusedAttnRNGStateChecker()
    return jnp.zeros((1, checker.rng_state_size), checker.rng_state_dtype)


def _descriptor(q: Array, k: Array, lengths: Lengths) -> Any:
    """Say how many queries and keys of each batch row are real."""
    assert not isinstance(lengths, Pairs)
    queries = jnp.full(q.shape[0], q.shape[1], jnp.int32)
    keys = (
        jnp.full(q.shape[0], k.shape[1], jnp.int32) if lengths is None else jnp.maximum(lengths, 1)
    )
    return _te("attention").SequenceDescriptor.from_seqlens((queries, keys))


def _settings(p: Piece, lengths: Lengths, scale: float) -> dict[str, Any]:
    te = _te("attention")
    causal, kinds = p.right == 0, te.AttnMaskType
    plain, padded = (
        (kinds.CAUSAL_MASK, kinds.PADDING_CAUSAL_MASK)
        if causal
        else (kinds.NO_MASK, kinds.PADDING_MASK)
    )
    window = None if p.left is None else (p.left, -1 if p.right is None else p.right)
    return {
        "attn_bias_type": te.AttnBiasType.NO_BIAS,
        "attn_mask_type": plain if lengths is None else padded,
        "softmax_type": te.AttnSoftmaxType.VANILLA_SOFTMAX,
        "qkv_layout": te.QKVLayout.BSHD_BSHD_BSHD,
        "scaling_factor": scale,
        "dropout_probability": 0.0,
        "is_training": True,
        "max_segments_per_seq": 1,
        "window_size": window,
    }


def _refuse_window(parts: fused_masks.Parts, call: Call) -> Reason | None:
    """Refuse windows on a part of the tokens, or of more queries than keys."""
    band = parts.band
    assert band is not None
    if band.left is None:
        return None
    cut = pieces(band, band.offset, call.q_len, call.kv_len)
    fits = all(p.left is None or p.q1 - p.q0 <= p.k1 - p.k0 for p in cut)
    if fits and not call.sharded:
        return None
    rule = "it takes windows of no more queries than keys, with every token on one device"
    return Reason("cudnn_flash_te", f"mask {parts.positions[0]}", rule, fused_masks.REMEDY)
