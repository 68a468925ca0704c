"""How much memory attention takes on one device, as a sum of named parts: an estimate, made without a compiler.

`maxattn compile` has the TPU's compiler say it; this is for machines that it cannot compile for, and for a first look.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.block_sizes import BlockSizes, fused_partials_bytes
from maxattn.block_sizes.sizes import LANES
from maxattn.call import Call
from maxattn.context.base import itemsize, readable
from maxattn.plan import Plan

GIB = 2**30
# Bytes that a program may use on one device. TPUs: what libtpu 0.0.42 says when a program needs more ("exceeds
# available HBM (95.74G)"); of v7x, a device is half a chip. GPUs: the card's memory as its maker sells it.
HBM = {
    "TPU v4": 30.75 * GIB, "TPU v5e": 15.75 * GIB, "TPU v5p": 95.74 * GIB, "TPU v6e": 31.25 * GIB,
    "TPU v7x": 94.75 * GIB, "NVIDIA A100": 80e9, "NVIDIA H100": 80e9, "NVIDIA H200": 141e9, "NVIDIA B200": 180e9,
}  # fmt: skip
FLOAT = 4


@dataclass(frozen=True)
class Part:
    """Name one share of the memory, in bytes."""

    what: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.what} {readable(self.bytes)}"


def estimate(plan: Plan, training: bool) -> tuple[Part, ...]:
    """List what attention alone holds at once on one device; the rest of a model comes on top.

    Args:
        plan: its kernel, strategy and lengths.
        training: forward and backward at their largest; else forward alone.
    """
    call = plan.padded_call
    local = plan.context.local_call(call)
    rows = local.batch * local.heads * local.q_len
    q = rows * local.head_dim * itemsize(call.dtype)
    kv = 2 * local.batch * local.kv_heads * local.head_dim * _own_keys(plan, call) * itemsize(call.dtype)
    times = 2 if training else 1  # each array beside its gradient
    parts = [Part("q, out" + (" and gradients" if training else ""), 2 * times * q),
             Part("k, v" + (" and gradients" if training else ""), times * kv)]  # fmt: skip
    parts += _moved(plan, local, kv, training)
    parts += _of_kernel(plan, local, training)
    return tuple(part for part in parts if part.bytes)


def _own_keys(plan: Plan, call: Call) -> int:
    """Return how many keys of q's, k's and v's own arrays one device holds."""
    ways = dict(plan.mesh).get("context", 1) if plan.context.kv_letter() == "S" else 1
    return -(-call.kv_len // ways)


def _moved(plan: Plan, local: Call, kv: int, training: bool) -> list[Part]:
    """Count what arrives from other devices: K and V of all, or those of the next hop."""
    if not any(c.when == "forward" for c in plan.collectives):
        return []
    arrived = 2 * local.batch * local.kv_heads * local.head_dim * local.kv_len * itemsize(local.dtype)
    if plan.context.name in ("ring", "ulysses_ring"):
        gradients = 2 * FLOAT * local.batch * local.kv_heads * local.head_dim * local.kv_len * 2 if training else 0
        return [Part("k, v of the next hop", arrived), Part("dk, dv on their way", gradients)]
    gradients = FLOAT * arrived // itemsize(local.dtype) if training else 0
    name = "gathered k, v" if plan.context.name == "all_gather" else "exchanged k, v"
    return [Part(name, arrived), Part("their gradients in float32", gradients)]


def _of_kernel(plan: Plan, local: Call, training: bool) -> list[Part]:
    rows = local.batch * local.heads * local.q_len
    if plan.kernel.name == "dot_product":
        # Scores and probabilities forward; in training the gradients of both beside them.
        return [Part("scores T x S in float32", rows * local.kv_len * FLOAT * (4 if training else 2))]
    blocks = getattr(plan.kernel, "blocks", None)
    if not isinstance(blocks, BlockSizes) or plan.target.platform != "tpu":
        return [Part("log-sum-exp", rows * FLOAT)]
    parts = [Part(f"log-sum-exp over {LANES} lanes", rows * LANES * FLOAT)]
    return [*parts, Part("dq in parts, fused backward", fused_partials_bytes(local, blocks))] if training else parts


def total(parts: tuple[Part, ...]) -> int:
    """Add the parts up, in bytes."""
    return sum(part.bytes for part in parts)


def limit(plan: Plan) -> float | None:
    """Return the bytes that one device of the target has, or None where that is not known."""
    return HBM.get(plan.target.device_kind)
