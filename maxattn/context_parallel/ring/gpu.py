"""The schedule of a ring among GPUs: every device reaches every other at full rate.

XLA keeps one collective in flight on a GPU: a second one beside the same kernel would be exposed.
So K and V travel as one array. Gradients of a hop's keys travel straight to the keys' owner, in
the dtype of K (float32 for float16), while the next hop is computed; the owner sums them in
float32. Partial results stay as the kernel wrote them until one pass merges or sums them. If every
query sees every key, `gpu_full_mask.py` puts a kernel beside each transfer of the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.context_parallel.base import FLOAT, Collective, gradient_itemsize, itemsize
from maxattn.context_parallel.ring import gpu_full_mask
from maxattn.context_parallel.ring.hops import (
    Keys,
    Piece,
    RingPass,
    hop_collectives,
    tie_transfer_to_kernel,
    unseen,
)
from maxattn.context_parallel.timeline import Share, Traffic
from maxattn.kernels import KERNELS, computed_call
from maxattn.kernels.base import Bias, Grads, Inputs, Kernel, Result, Rows
from maxattn.kernels.kv_block import MOST_PARTS, Packed, added, pack, total, widened
from maxattn.kernels.softmax import gradient_dtype, merge_by_lse
from maxattn.target import Target

MODE = "xla_gpu_collective_permute_mode"
COPY_ENGINES = (
    "NCCL takes streaming multiprocessors (SMs) from the kernels while it moves K and V; "
    f"with XLA_FLAGS=--{MODE}=peer copy engines move them, if one process runs all GPUs"
)


@dataclass(frozen=True)
class GpuSchedule:
    """Send K and V as one array, and their gradients straight to the keys' owner."""

    # whether XLA's flags set how blocks move between GPUs, or the flag does not apply to these
    # GPUs; `explain` then prints no note about the flag
    copy_engine_flag_set: bool = False
    directions: ClassVar[int] = 1

    @classmethod
    def build(cls, target: Target) -> Self:
        """Read the XLA flags of a target; the flag is for NCCL, which GPUs of AMD do not run."""
        is_set = MODE in dict(target.env).get("XLA_FLAGS", "")
        return cls(is_set or target.device.vendor == "AMD")

    def backward_line(self, kernel: Kernel, call: Call) -> str:
        keys, dims = (call.batch, call.kv_len, call.kv_heads), (call.head_dim, call.value_dim)
        shapes = (call.batch, call.q_len, call.heads, call.head_dim), *((*keys, n) for n in dims)
        operands: Any = [jax.ShapeDtypeStruct(shape, call.dtype) for shape in shapes]
        return kernel.accumulator_line(Inputs(*operands))

    def notes(self) -> tuple[str, ...]:
        return () if self.copy_engine_flag_set else (COPY_ENGINES,)

    def collectives(self, hop: Call, sends: int, chunks_per_rank: int) -> tuple[Collective, ...]:
        """List the hops; K and V are padded to one width; gradients of local keys do not travel."""
        widest = max(hop.head_dim, hop.value_dim)
        elements = 2 * hop.batch * hop.kv_len * hop.kv_heads * widest
        block, grads = (elements * size(hop.dtype) for size in (itemsize, gradient_itemsize))
        return hop_collectives(sends, block, (sends, grads), arrays=1)

    def traffic(self, hops: int, share: Share, hop: Call) -> Traffic:
        """Return the traffic and memory of `hops` hops; gradients travel in `gradient_dtype` of K.

        If every query sees every key, memory has three blocks of K and V (local, current, next)
        and four of gradients (local, current, sent, received).

        Each part of out, dk and dv is read once and each sum is written; K and V are packed,
        forward and backward. Unless dQ is a running sum, parts of dq are read and summed too, and
        dK and dV of each hop are packed.
        """
        q, kv, item, _ = share
        dense = hop.mask.is_full and hop.bias is None
        if dense:
            came = min(hops - 3, MOST_PARTS + FLOAT // item)
            held = (4 if hops == 2 else 6 + came) * kv + FLOAT / item * q
        else:
            held = (2 + min(hops, MOST_PARTS)) * kv + min(hops, MOST_PARTS) * q
        merged = (hops + 1) * (q + kv) + 4 * kv
        # The kernel is chosen after the strategy: any kernel that may sum dQ counts.
        may_keep = dense and any(
            KERNELS[name].may_keep_dq(computed_call(name, hop, "gpu"), "gpu") for name in KERNELS
        )
        if not may_keep:
            merged += (hops + 1) * q + 2 * hops * kv
        return Traffic(gradient_itemsize(hop.dtype), True, dense, held, merged)

    # ---- inside `shard_map` ----------------------------------------------------------------------

    def forward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs) -> Result:
        # Packed in the same way as in the backward: a program with both passes packs once.
        queries = ring_pass.order.to_zigzag(inputs.q, 1)
        packed, dims = _packed(ring_pass.keys(inputs)), (inputs.k.shape[3], inputs.v.shape[3])
        parts: list[list[Result]] = [[] for _ in ring_pass.chunks]
        for hop in ring_pass.hops:

            def attend(i: int, j: int, hop: int = hop, packed: Packed = packed) -> Result:
                here = _unpacked(packed, dims)[j]
                return kernel.forward(ring_pass.inputs(hop, (i, j), queries[i], here))

            packed, found = tie_transfer_to_kernel(
                ring_pass.send_on(hop, packed), ring_pass.pieces(hop, attend)
            )
            for (i, _), part in found.items():
                if len(parts[i]) >= MOST_PARTS:
                    parts[i] = [Result(*merge_by_lse(parts[i]))]
                parts[i].append(part)
        both = zip(parts, queries, strict=True)
        merged = [merge_by_lse(found or [unseen(x, dims[1])]) for found, x in both]
        return ring_pass.result(merged, inputs.q)

    def backward(self, ring_pass: RingPass, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        if ring_pass.is_dense:
            return gpu_full_mask.backward(ring_pass, kernel, inputs, rows)
        queries, chunks = ring_pass.order.to_zigzag(inputs.q, 1), ring_pass.rows(rows)
        packed, dims = _packed(ring_pass.keys(inputs)), (inputs.k.shape[3], inputs.v.shape[3])
        dqs: list[list[Array]] = [[] for _ in ring_pass.chunks]
        dbias: list[Bias] = jax.tree.map(partial(jnp.zeros_like, dtype="float32"), ring_pass.biases)
        home: list[Packed] = []  # gradients of the local keys
        leaving: tuple[int, Packed] | None = None  # the previous hop, and the gradients of its keys
        for hop in ring_pass.hops:

            def gradients(i: int, j: int, hop: int = hop, packed: Packed = packed) -> Grads:
                here = _unpacked(packed, dims)[j]
                return kernel.backward(ring_pass.inputs(hop, (i, j), queries[i], here), chunks[i])

            sent = leaving and ring_pass.send_to_owner(*leaving)
            (packed, arrived), found = tie_transfer_to_kernel(
                (ring_pass.send_on(hop, packed), sent), ring_pass.pieces(hop, gradients)
            )
            for (i, j), (dq, _, _, db) in found.items():
                dqs[i] = added(dqs[i], dq)
                dbias[i] = ring_pass.add_bias(dbias[i], db, hop, j)
            if arrived is not None:
                home = added(home, arrived)
            leaving = hop, _gradients_of_keys(ring_pass, found, packed)
            if hop == 0:
                home, leaving = [leaving[1]], None
        if leaving is not None:
            home = added(home, ring_pass.send_to_owner(*leaving))
        back = ring_pass.order.from_zigzag
        summed = _unpacked(total(home, home[0]).astype(home[0].dtype), dims)
        dk, dv = (back([pair[which] for pair in summed], 1) for which in (0, 1))
        found = [total(parts, x) for parts, x in zip(dqs, queries, strict=True)]
        dq = back([x.astype(gradient_dtype(inputs.q)) for x in found], 1)
        return Grads(dq, dk, dv, ring_pass.whole_bias(dbias))


def _gradients_of_keys(ring_pass: RingPass, found: dict[Piece, Any], like: Packed) -> Packed:
    """Sum the gradients of K and V over query chunks, and round them to `gradient_dtype`."""
    sums = [
        widened(total([g[p] for (_, j), g in found.items() if j == chunk], like[0]), like.shape[4])
        for chunk in ring_pass.chunks for p in (1, 2)
    ]  # fmt: skip
    return jnp.stack([x.astype(gradient_dtype(like)) for x in sums])


def _packed(keys: Keys) -> Packed:
    return jnp.concatenate([pack(*pair) for pair in keys])


def _unpacked(packed: Packed, dims: tuple[int, int]) -> Keys:
    starts, (h, v) = range(0, packed.shape[0], 2), dims
    return [(packed[i, ..., :h], packed[i + 1, ..., :v]) for i in starts]
