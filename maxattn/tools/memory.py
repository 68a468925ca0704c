"""How much memory attention takes on one device, as a sum of named parts: an estimate, made without
a compiler.

`maxattn compile` has the TPU's compiler say it; this is for machines that it cannot compile for,
and for a first look. Beside libtpu 0.0.42 it came to 0.92 to 1.16 of what the compiler said in
eight cases (Wan 1.3B and 14B at 480p, alone, on a ring and on Ulysses over 4, inference and
training), and to 0.73 for SDXL's cross-attention in training. Short arrays that the compiler keeps
in VMEM are counted too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from maxattn.block_sizes import BlockSizes, fused_partials_bytes
from maxattn.block_sizes.sizes import LANES, round_up
from maxattn.call import Call
from maxattn.context_parallel.base import itemsize, readable
from maxattn.devices import memory_of
from maxattn.plan import Plan
from maxattn.sharding import ways

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
    local, runs = plan.context.local_call(plan.padded_call), plan.context.chunks_per_rank
    place = replace(
        local, q_len=runs * local.q_len, kv_len=runs * local.kv_len
    )  # a kernel sees one run of them
    times = 2 if training else 1  # each array beside its gradient
    parts = [
        Part(
            "q, out" + (" and gradients" if training else ""),
            2 * times * _queries(place, place.head_dim),
        ),
        Part("k, v" + (" and gradients" if training else ""), times * _own_keys(plan)),
        *_moved(plan, place, training),
        *_of_kernel(plan, local, training),
    ]
    return tuple(part for part in parts if part.bytes)


def _queries(local: Call, head_dim: int, size: int = 0) -> int:
    """Count the bytes of one array like q."""
    return local.batch * local.heads * local.q_len * head_dim * (size or itemsize(local.dtype))


def _keys(local: Call, head_dim: int, size: int = 0) -> int:
    """Count the bytes of two arrays like k and v, as the kernel sees them."""
    return (
        2 * local.batch * local.kv_heads * local.kv_len * head_dim * (size or itemsize(local.dtype))
    )


def _own_keys(plan: Plan) -> int:
    """Count the bytes of k's and v's shards outside of attention."""
    call, shape = plan.padded_call, plan.mesh
    split = ways("S", shape) if plan.context.kv_letter() == "S" else 1
    rows = (
        call.batch
        // ways("B", shape)
        * max(1, call.kv_heads // ways("K", shape))
        * -(-call.kv_len // split)
    )
    return 2 * rows * call.head_dim * itemsize(call.dtype)


def _moved(plan: Plan, local: Call, training: bool) -> list[Part]:
    """Count what arrives from other devices beside the kernel's own operands."""
    h = local.head_dim
    if plan.context.name in ("ring", "ulysses_ring"):
        gradients = 2 * _keys(local, h, FLOAT) if training else 0
        sums = _queries(local, h, FLOAT) * (2 if training else 1)
        return [
            Part("k, v of the next hop", _keys(local, h)),
            Part("dk, dv on their way", gradients),
            Part("sums over the hops in float32", sums),
        ]
    if plan.context.name != "all_gather":
        return []  # exchanged arrays are the kernel's operands
    return [
        Part("gathered k, v", _keys(local, h)),
        Part("their gradients in float32", training * _keys(local, h, FLOAT)),
    ]


def _of_kernel(plan: Plan, local: Call, training: bool) -> list[Part]:
    rows = local.batch * local.heads * local.q_len
    if plan.kernel.name == "dot_product":
        scores = rows * local.kv_len * FLOAT
        return [Part("scores T x S", int(scores * _score_copies(plan, training)))]
    blocks = plan.kernel.blocks
    if not isinstance(blocks, BlockSizes) or plan.target.platform != "tpu":
        return [Part("log-sum-exp", rows * FLOAT)]
    return list(of_tiles(plan.kernel.name, local, blocks, training))


def of_tiles(kernel: str, local: Call, blocks: BlockSizes, training: bool) -> tuple[Part, ...]:
    """List what a TPU's tiled kernel holds beside its operands and results.

    Args:
        kernel: "flash" or "tokamax_flash".
        local: what one device computes.
        blocks: its tiles.
        training: whether the backward runs too.
    """
    lanes = round_up(local.head_dim, LANES)
    copies = (4 if training else 2) * _queries(local, lanes) + _keys(local, lanes)
    sums = local.batch * local.heads * local.q_len * LANES * FLOAT
    parts = fused_partials_bytes(local, blocks, kernel) if training else 0  # type: ignore[arg-type]
    return (
        Part("copies in the kernel's layout", copies),
        Part(f"log-sum-exp over {LANES} lanes", sums),
        Part("dq in parts, fused backward", parts),
    )


def fits_alone(
    kernel: str, local: Call, blocks: BlockSizes, training: bool, device_kind: str
) -> bool:
    """Say whether a tiled kernel, its operands and results fit one device; True where its memory is
    not known.
    """
    operands = (2 if training else 1) * (
        2 * _queries(local, local.head_dim) + _keys(local, local.head_dim)
    )
    needed = operands + sum(part.bytes for part in of_tiles(kernel, local, blocks, training))
    return needed <= (memory_of(device_kind) or float("inf"))


def _score_copies(plan: Plan, training: bool) -> float:
    """Return how many float32 T x S arrays are alive at once, as the compilers of TPUs and CPUs
    were seen to do it.
    """
    if plan.target.platform == "tpu":
        return 1 + itemsize(plan.call.dtype) / FLOAT if training else 1
    return 4 if training else 2


def total(parts: tuple[Part, ...]) -> int:
    """Add the parts up, in bytes."""
    return sum(part.bytes for part in parts)


def limit(plan: Plan) -> float | None:
    """Return the bytes that one device of the target has, or None where that is not known."""
    return memory_of(plan.target.device_kind)
