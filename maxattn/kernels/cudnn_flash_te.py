"""cuDNN's fused attention through TransformerEngine's own functions, without its Linen module.

The module would fall back in silence, ask for a mesh resource, and read the environment. Here the
resource is an empty one for the length of a call, and a mask or a window that has no fused kernel
is refused by name. Lengths go in as a sequence descriptor. No mask array is made:
TransformerEngine's has True where a pair is not allowed.

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
from maxattn.kernels.base import USE_AUTO, Grads, Lines, Result, Rows, refuse_mask
from maxattn.kernels.fused import bias_limits, cudnn_limits
from maxattn.kernels.fused.kernel import Fused, mapped_call, refuse_shards
from maxattn.kernels.fused.rectangles import Pairs, PieceInputs
from maxattn.masks.band_pieces import pieces
from maxattn.masks.terms import Terms, sort_terms
from maxattn.target import Target


@dataclass(frozen=True)
class CudnnFlashTe(Fused):
    """Compute out = softmax(scale * q k^T + bias) v with TransformerEngine's fused attention.

    Its backward always computes the gradient of a bias.

    Args:
        version: of transformer-engine-jax.
    """

    name: ClassVar[str] = "cudnn_flash_te"
    reaches: ClassVar[float] = 0.85  # H200, 32,760 tokens: 551 to 575 TFLOP/s
    version: str = ""

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse float32, long head dims, biases of another dtype, and masks of many kinds.

        Beside a bias it takes every mask: what is hidden is written into the bias.
        """
        refused = target.refuse_untested("cudnn_flash_te", "transformer-engine-jax")
        refused = refused or cudnn_limits.refuse("cudnn_flash_te", call, target)
        if refused or call.bias is not None:
            return refused or bias_limits.refuse("cudnn_flash_te", call, target)
        terms = sort_terms(call.mask)
        return (
            refuse_mask("cudnn_flash_te", terms)
            or refuse_shards("cudnn_flash_te", terms, call)
            or _refuse_window(terms, call)
        )

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Refuse: gradients are added up in no fixed order."""
        rule = "its backward adds gradients up in no fixed order"
        return Reason("cudnn_flash_te", "deterministic", rule, USE_AUTO)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> CudnnFlashTe:
        """Take the scale, and whether the LSE is asked for."""
        version = target.version("transformer-engine-jax") or ""
        return CudnnFlashTe(call.scale, call.return_lse, version)

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        return Lines(f"cudnn_flash_te (TransformerEngine {self.version})", "the library's own")

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Say what memory a bias takes."""
        return () if call.bias is None else (bias_limits.note(call, always=True),)

    def piece_forward(self, inputs: PieceInputs) -> Result:
        """Return (out, lse) of one rectangle."""
        return mapped_call(self._one_forward, inputs)

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv, dbias) of one rectangle."""
        return mapped_call(self._one_backward, inputs, rows)

    def _one_forward(self, inputs: PieceInputs) -> Result:
        with _no_mesh_resource():
            qkv = inputs.q, inputs.k, inputs.v
            operands = qkv, inputs.bias, None, _descriptor(inputs), None
            run = _te("cpp_extensions").fused_attn_fwd
            out, lse, _, _ = run(*operands, **_settings(inputs, self.scale))
        return Result(out, lse[..., 0])

    def _one_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        with _no_mesh_resource():
            given = rows.lse[..., None], _rng_state(), rows.out, rows.dout, _descriptor(inputs)
            run, qkv = _te("cpp_extensions").fused_attn_bwd, (inputs.q, inputs.k, inputs.v)
            settings = _settings(inputs, self.scale)
            (dq, dk, dv), dbias, _ = run(qkv, inputs.bias, None, *given, **settings)
        return Grads(dq, dk, dv, None if inputs.bias is None else dbias)


def _te(module: str) -> Any:
    # TransformerEngine is an extra: it need not be there when this file is read.
    return import_module(f"transformer_engine.jax.{module}")


def _no_mesh_resource() -> Any:
    """Tell TransformerEngine that one device is at work: every call here is about one shard."""
    sharding = _te("sharding")
    return sharding.global_shard_guard(sharding.MeshResource())


def _rng_state() -> Array:
    """Return the state of dropout that the forward would hand on; nothing reads it without one."""
    checker = _te("cpp_extensions.attention")._FusedAttnRNGStateChecker()
    return jnp.zeros((1, checker.rng_state_size), checker.rng_state_dtype)


def _descriptor(inputs: PieceInputs) -> Any:
    """Say how many queries and keys of each batch row are real."""
    lengths, batch = inputs.lengths, inputs.q.shape[0]
    assert not isinstance(lengths, Pairs)
    queries = jnp.full(batch, inputs.q.shape[1], jnp.int32)
    every = jnp.full(batch, inputs.k.shape[1], jnp.int32)
    # A length of 0 is kept from the kernel; what that row then gives is replaced by 0 and -inf.
    keys = every if lengths is None else jnp.maximum(lengths, 1)
    return _te("attention").SequenceDescriptor.from_seqlens((queries, keys))


def _settings(inputs: PieceInputs, scale: float) -> dict[str, Any]:
    te, p = _te("attention"), inputs.piece
    kinds = te.AttnBiasType
    window = None if p.left is None else (p.left, -1 if p.right is None else p.right)
    return {
        "attn_bias_type": kinds.NO_BIAS if inputs.bias is None else kinds.POST_SCALE_BIAS,
        "attn_mask_type": _mask_type(inputs),
        "softmax_type": te.AttnSoftmaxType.VANILLA_SOFTMAX,
        "qkv_layout": te.QKVLayout.BSHD_BSHD_BSHD,
        "scaling_factor": scale,
        "dropout_probability": 0.0,
        "is_training": True,
        "max_segments_per_seq": 1,
        "window_size": window,
    }


def _mask_type(inputs: PieceInputs) -> Any:
    types, causal = _te("attention").AttnMaskType, inputs.piece.right == 0
    if inputs.lengths is None:
        return types.CAUSAL_MASK if causal else types.NO_MASK
    return types.PADDING_CAUSAL_MASK if causal else types.PADDING_MASK


def _refuse_window(terms: Terms, call: Call) -> Reason | None:
    """Refuse windows on a part of the tokens, or of more queries than keys."""
    band = terms.band
    assert band is not None
    if band.left is None:
        return None
    cut = pieces(band, band.offset, call.q_len, call.kv_len)
    fits = all(p.left is None or p.q1 - p.q0 <= p.k1 - p.k0 for p in cut)
    if fits and not call.sharded:
        return None
    rule = "it takes windows of no more queries than keys, with every token on one device"
    return Reason("cudnn_flash_te", f"mask {terms.positions[0]}", rule, USE_AUTO)
