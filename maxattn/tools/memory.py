"""Estimate the memory of attention on one device, as a sum of named parts.

No compiler runs. For a TPU, `maxattn compile` reports the compiler's own numbers instead. The
estimate was 0.92 to 1.16 times what libtpu 0.0.42 reported in eight cases (Wan 1.3B and 14B at
480p, in inference and training, on one device, a ring of 4 and Ulysses over 4), and 0.73 times for
SDXL's cross-attention in training. Short arrays that the compiler keeps in VMEM are counted too.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxattn._plan import Plan
from maxattn.block_sizes import BlockSizes, fused_partials_bytes
from maxattn.block_sizes.sizes import LANES, round_up
from maxattn.call import Call
from maxattn.context_parallel.base import itemsize, readable
from maxattn.decide import kernel_call
from maxattn.devices import memory_of
from maxattn.kernels import computed_call, scores_of
from maxattn.sharding import ways

FLOAT = 4


@dataclass(frozen=True)
class Part:
    """One named part of the memory, in bytes."""

    what: str
    bytes: int

    def __str__(self) -> str:
        return f"{self.what} {readable(self.bytes)}"


def estimate(plan: Plan, training: bool) -> tuple[Part, ...]:
    """List the memory that attention alone needs at once on one device, part by part."""
    local, chunks = plan.strategy.local_call(plan.padded_call), plan.strategy.chunks_per_rank
    # The kernel gets one chunk of a rank's shard.
    rank = local.derived(q_len=chunks * local.q_len, kv_len=chunks * local.kv_len)
    times = 2 if training else 1  # each array has a gradient of its size
    queries = "q, out and gradients" if training else "q, out"
    keys = "k, v and gradients" if training else "k, v"
    parts = [
        Part(queries, times * _queries(rank, _dims(rank))),
        Part(keys, times * _own_keys(plan)),
        *_moved(plan, rank, training),
        *_of_kernel(plan, training),
    ]
    return tuple(part for part in parts if part.bytes)


def _dims(call: Call) -> tuple[int, int]:
    """Return the head dim of Q and K, and that of V and the output."""
    return call.head_dim, call.value_dim


def _queries(local: Call, dims: tuple[int, ...], size: int = 0) -> int:
    """Sum the bytes of [B, N, T, dim] arrays; `size` is bytes per entry, 0 for the call's dtype."""
    rows = local.batch * local.heads * local.q_len
    return rows * sum(dims) * (size or itemsize(local.dtype))


def _keys(local: Call, dims: tuple[int, ...], size: int = 0) -> int:
    """Sum the bytes of [B, K, S, dim] arrays; `size` is bytes per entry, 0 for the call's dtype."""
    rows = local.batch * local.kv_heads * local.kv_len
    return rows * sum(dims) * (size or itemsize(local.dtype))


def _own_keys(plan: Plan) -> int:
    call, shape = plan.padded_call, plan.mesh
    split = ways("S", shape) if plan.strategy.kv_letter() == "S" else 1
    batch, heads = call.batch // ways("B", shape), max(1, call.kv_heads // ways("K", shape))
    return batch * heads * -(-call.kv_len // split) * sum(_dims(call)) * itemsize(call.dtype)


def _moved(plan: Plan, rank: Call, training: bool) -> list[Part]:
    """List the arrays that a context strategy keeps besides the kernel's own operands."""
    keys, float_keys = _keys(rank, _dims(rank)), _keys(rank, _dims(rank), FLOAT)
    if plan.strategy.name in ("ring", "ulysses_ring"):
        summed = (rank.value_dim, rank.head_dim) if training else (rank.value_dim,)
        sums = _queries(rank, summed, FLOAT)  # of out, in training also of dq
        return [
            Part("k, v of the next hop", keys),
            Part("dk, dv in transfer", 2 * float_keys if training else 0),
            Part("sums over the hops in float32", sums),
        ]
    if plan.strategy.name != "all_gather":
        return []  # Ulysses exchanges only the kernel's operands
    gradients = Part("gathered dk, dv in float32", training * float_keys)
    return [Part("gathered k, v", keys), gradients]


def _of_kernel(plan: Plan, training: bool) -> list[Part]:
    local, platform = kernel_call(plan.padded_call, plan.strategy), plan.target.platform
    forward, _, backward = plan.kernel.name.partition("/")
    if "dot_product" in (forward, backward if training else ""):
        # Number of float32 [T, S] arrays that TPU and CPU compilers keep at once, as observed.
        copies = 4 if training else 2
        if platform == "tpu":
            copies = 1 + itemsize(plan.call.dtype) / FLOAT if training else 1
        return [Part("scores T x S", int(scores_of(local) * FLOAT * copies))]
    blocks = plan.kernel.blocks
    if isinstance(blocks, BlockSizes) and platform == "tpu":
        name = plan.kernel.name.rpartition("/")[2]  # the backward needs most of the memory
        return list(of_tiles(name, computed_call(name, local, platform), blocks, training))
    found = [Part("log-sum-exp", local.batch * local.heads * local.q_len * FLOAT)]
    wide = computed_call(plan.kernel.name, local, platform)
    if _dims(wide) != _dims(local):  # copies of V and out, or of Q and K, padded with zeros
        dim = (wide.head_dim,)
        size = (2 if training else 1) * (_queries(local, dim) + _keys(local, dim))
        found.append(Part(f"copies padded to head dim {dim[0]}", size))
    return found


def of_tiles(kernel: str, local: Call, blocks: BlockSizes, training: bool) -> tuple[Part, ...]:
    """List the buffers of a tiled TPU kernel besides its operands and results."""
    lanes = tuple(round_up(dim, LANES) for dim in _dims(local))
    copies = (2 if training else 1) * _queries(local, lanes) + _keys(local, lanes)
    sums = local.batch * local.heads * local.q_len * LANES * FLOAT
    parts = fused_partials_bytes(local, blocks, kernel) if training else 0  # type: ignore[arg-type]
    gradients = 0
    if training and kernel == "tpu_flash":
        gradients = _queries(local, (local.head_dim,), FLOAT) + _keys(local, _dims(local), FLOAT)
    return (
        Part("copies in the kernel's layout", copies),
        Part(f"log-sum-exp over {LANES} lanes", sums),
        Part("dq in parts, fused backward", parts),
        Part("dq, dk, dv in float32", gradients),
    )


def fits_alone(
    kernel: str, local: Call, blocks: BlockSizes, training: bool, device_kind: str
) -> bool:
    """Check whether a tiled kernel with its arrays fits a device; True if the memory is unknown."""
    arrays = _queries(local, _dims(local)) + _keys(local, _dims(local))
    inside = total(of_tiles(kernel, local, blocks, training))
    needed = (2 if training else 1) * arrays + inside
    return needed <= (memory_of(device_kind) or float("inf"))


def total(parts: tuple[Part, ...]) -> int:
    """Sum the parts, in bytes."""
    return sum(part.bytes for part in parts)
