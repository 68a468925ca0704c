"""Which biases FlashAttention-4 takes: it adds one of any dtype to its scores, in float32.

Its kernels for Hopper GPUs do, as maxattn launches them (score_mod.py). They have no gradient of a
bias: where that is asked for, the blockwise kernel computes the whole backward.
"""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.call import Call, Reason
from maxattn.kernels.base import USE_AUTO, Grads, Result, Rows
from maxattn.kernels.fa4.block_sparse import TilePass, backward, forward
from maxattn.kernels.fa4.forward_tiles import library_tile
from maxattn.kernels.fa4.tile_sizes import backward_tile, takes_lists
from maxattn.kernels.fused import limits
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.target import Target

ADDED = "a bias is added pair by pair"
PLAIN = "memory_efficient where the bias has a gradient"


def refuse(call: Call, target: Target) -> Reason | None:
    """Return why FlashAttention-4 cannot add the bias of a call."""
    version = target.version("fa4-jax") or ""
    if not takes_lists(version, target.device):
        rule = f"it adds a bias on Hopper GPUs alone, and this is {target.device_kind}"
        return Reason("flash", "bias", rule, USE_AUTO)
    reason = limits.refuse_head_dim("flash", call)
    return reason or limits.refuse_size("flash", call)


def note(call: Call) -> str:
    """Say what memory a bias takes, and who computes its gradient."""
    written = limits.written_text(call)
    return (
        f"{written}; FlashAttention-4 has no gradient of it: where it has one, memory_efficient"
        " computes the backward"
    )


def run_forward(inputs: PieceInputs, scale: float) -> Result:
    """Return (out, lse) of a rectangle with a bias."""
    tiles = TilePass(library_tile(inputs.q.shape[3]), scale, bias=inputs.bias)
    return Result(*forward(inputs.q, inputs.k, inputs.v, tiles))


def run_backward(inputs: PieceInputs, rows: Rows, scale: float) -> Grads:
    """Return (dq, dk, dv) of a rectangle with a bias, from a given output and LSE.

    Each query head gets a key head of its own: where they share one, fa4-jax 0.1.0 hands another
    head and another query to `score_mod` in its backward for Hopper GPUs, as if they were packed.
    """
    group = inputs.q.shape[2] // inputs.k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) if group > 1 else x for x in (inputs.k, inputs.v))
    tiles = TilePass(backward_tile(inputs.q.shape[3]), scale, bias=inputs.bias)
    dq, dk, dv, _ = backward(replace(inputs, k=k, v=v), rows, tiles)
    return Grads(dq, _of_shared(dk, group), _of_shared(dv, group))


def _of_shared(grad: Float[Array, "B S N H"], group: int) -> Float[Array, "B S K H"]:
    """Sum the gradients of the heads that share a key head, in float32."""
    b, s, n, h = grad.shape
    return grad.astype(jnp.float32).reshape(b, s, n // group, group, h).sum(3)
