"""cuDNN's fused attention through TransformerEngine's own functions, without its Linen module.

The Linen module falls back without a message, needs a mesh resource, and reads the environment.
This kernel sets an empty mesh resource during a call, and refuses masks that no fused kernel takes.
Lengths are passed as a sequence descriptor, not as a mask array.

Source: NVIDIA TransformerEngine, transformer_engine.jax.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

import jax.numpy as jnp

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Grads, Lines, Result, Rows, refuse_repeats
from maxattn.kernels.fused import limits
from maxattn.kernels.fused.kernel import Fused, folded
from maxattn.kernels.fused.rectangles import Intervals, PieceInputs
from maxattn.target import Target


@dataclass(frozen=True)
class CudnnFlashTe(Fused):
    """Compute out = softmax(scale * q k^T + bias) v with TransformerEngine's fused attention.

    Its backward always computes the gradient of a bias.
    """

    name: ClassVar[str] = "cudnn_flash_te"
    reaches: ClassVar[float] = 0.85  # H200, 32,760 tokens: 551 to 575 TFLOP/s
    version: str = ""  # the version of transformer-engine-jax

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        reason = target.refuse_untested("cudnn_flash_te", "transformer-engine-jax")
        return reason or limits.refuse("cudnn_flash_te", call, target)

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        return refuse_repeats("cudnn_flash_te")

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> CudnnFlashTe:
        version = target.version("transformer-engine-jax") or ""
        return CudnnFlashTe(call.scale, call.return_lse, version)

    def lines(self, call: Call) -> Lines:
        return Lines(f"cudnn_flash_te (TransformerEngine {self.version})", "the library's own")

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        return () if call.bias is None else (limits.note(call, always=True),)

    @folded
    def piece_forward(self, inputs: PieceInputs) -> Result:
        with _no_mesh_resource():
            operands = (inputs.q, inputs.k, inputs.v), inputs.bias, None, _lengths(inputs), None
            forward = _te("cpp_extensions").fused_attn_fwd
            out, lse, _, _ = forward(*operands, **_settings(inputs, self.scale))
        return Result(out, lse[..., 0])

    @folded
    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        with _no_mesh_resource():
            # The dropout's random state, which the backward does not read without dropout.
            checker = _te("cpp_extensions.attention")._FusedAttnRNGStateChecker()
            state = jnp.zeros((1, checker.rng_state_size), checker.rng_state_dtype)
            operands = (inputs.q, inputs.k, inputs.v), inputs.bias, None
            given = rows.lse[..., None], state, rows.out, rows.dout, _lengths(inputs)
            settings = _settings(inputs, self.scale)
            backward = _te("cpp_extensions").fused_attn_bwd
            (dq, dk, dv), dbias, _ = backward(*operands, *given, **settings)
        return Grads(dq, dk, dv, None if inputs.bias is None else dbias)


def _te(module: str) -> Any:
    # Imported here: TransformerEngine is an optional package.
    return import_module(f"transformer_engine.jax.{module}")


def _no_mesh_resource() -> Any:
    """Return a context that hides the mesh from TransformerEngine: each call computes one shard."""
    sharding = _te("sharding")
    return sharding.global_shard_guard(sharding.MeshResource())


def _lengths(inputs: PieceInputs) -> Any:
    """Return the numbers of real queries and keys per batch row as a sequence descriptor."""
    lengths, batch = inputs.lengths, inputs.q.shape[0]
    assert not isinstance(lengths, Intervals)
    queries = jnp.full(batch, inputs.q.shape[1], jnp.int32)
    every = jnp.full(batch, inputs.k.shape[1], jnp.int32)
    # cuDNN gets length 1 for a length of 0; that batch row's result is then set to 0 and -inf.
    keys = every if lengths is None else jnp.maximum(lengths, 1)
    return _te("attention").SequenceDescriptor.from_seqlens((queries, keys))


def _settings(inputs: PieceInputs, scale: float) -> dict[str, Any]:
    te, p = _te("attention"), inputs.piece
    biases, masks = te.AttnBiasType, te.AttnMaskType
    kinds = masks.NO_MASK, masks.CAUSAL_MASK, masks.PADDING_MASK, masks.PADDING_CAUSAL_MASK
    return {
        "attn_bias_type": biases.NO_BIAS if inputs.bias is None else biases.POST_SCALE_BIAS,
        "attn_mask_type": kinds[(p.right == 0) + 2 * (inputs.lengths is not None)],
        "softmax_type": te.AttnSoftmaxType.VANILLA_SOFTMAX,
        "qkv_layout": te.QKVLayout.BSHD_BSHD_BSHD,
        "scaling_factor": scale,
        "dropout_probability": 0.0,
        "is_training": True,
        "max_segments_per_seq": 1,
        "window_size": None if p.left is None else (p.left, -1 if p.right is None else p.right),
    }
