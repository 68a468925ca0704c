"""What a strategy is: how Q, K and V move between devices around a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import lcm, prod
from typing import Any, ClassVar, NamedTuple

import jax
from jax.sharding import PartitionSpec

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.kernels.bias_level import level_shape
from maxattn.masks import KeyLimit, Mask
from maxattn.sharding import BATCH_AXES, LETTERS, MeshShape, partition_spec, ways
from maxattn.target import Target

CONTEXT = "context"
"""The mesh axis that the sequence is split over."""


def readable(size: float) -> str:
    """Write a number of bytes with a unit, as `160 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if 999.5 <= size < 1024 else f"{size:.3g} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


@dataclass(frozen=True)
class Collective:
    """Name one transfer that a plan makes.

    Args:
        kind: "all_gather", "psum", "psum_scatter", "ppermute" or "all_to_all".
        axes: the mesh axes it runs over.
        what: the arrays that move.
        when: "forward" or "backward".
        bytes: bytes that one device receives, all hops together.
        hops: how many times it runs.
        arrays: how many arrays move each time.
    """

    kind: str
    axes: tuple[str, ...]
    what: str
    when: str
    bytes: int
    hops: int = 1
    arrays: int = 1

    def __str__(self) -> str:
        times = f" {self.hops} hops," if self.hops > 1 else ""
        return (
            f"{self.what} {self.kind} over {'+'.join(self.axes)},{times} {readable(self.bytes)},"
            f" {self.when}"
        )


class OperandSpecs(NamedTuple):
    """Say how (q, k, v, bias, mask, level of the bias) are split over a mesh.

    Args:
        letters: of the axes of each array.
        specs: the partition spec of each.
        lse: the spec of the LSE; the output has that of q.
    """

    letters: tuple[Any, ...]
    specs: tuple[Any, ...]
    lse: PartitionSpec


class Strategy:
    """Run a kernel's forward and backward on the shards of q, k and v, inside `shard_map`.

    Every strategy is a frozen dataclass. The defaults are those of one that splits the queries over
    the context axis and gives each device all keys.

    Attributes:
        name: the value of `context_parallel`.
        shape: the mesh's axes.
    """

    name: ClassVar[str]
    shape: MeshShape

    # ---- before the call -------------------------------------------------------------------------

    @classmethod
    def build(
        cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target
    ) -> Strategy:
        """Decide everything about the strategy for one (global) call."""
        raise NotImplementedError

    def supports(self, call: Call) -> Reason | None:
        """Return None when the strategy can lay out the call, else the reason why not."""
        return None

    # ---- the layout ------------------------------------------------------------------------------

    @property
    def chunks_per_rank(self) -> int:
        """Contiguous chunks of the sequence that a device attends with, each at its position."""
        return 1

    def unit(self) -> int:
        """Return what the lengths of the queries, and of sharded keys, are padded to."""
        return ways("T", self.shape)

    def head_ways(self) -> int:
        """Return over how many devices the key heads are split while attention is computed."""
        return ways("N", self.shape)

    def kv_letter(self) -> str:
        """Return "S" where the key axis is sharded over context, "." where it is replicated."""
        return "."

    def mask_letters(self, letters: str) -> str:
        """Replace by "." those axes of a mask or bias that stay whole on every device."""
        return letters.replace("S", ".")

    def padded_call(self, call: Call) -> Call:
        """Return the call with whole shards, and with key heads for every share of the heads."""
        q_len, kv_len = (-(-n // self.unit()) * self.unit() for n in (call.q_len, call.kv_len))
        kv_len = kv_len if self.kv_letter() == "S" else call.kv_len
        mask = call.mask & KeyLimit(call.kv_len) if kv_len > call.kv_len else call.mask
        kv_heads = lcm(call.kv_heads, self.head_ways())
        return call.derived(q_len=q_len, kv_len=kv_len, kv_heads=kv_heads, mask=mask)

    def operand_specs(self, call: Call, mask: Mask) -> OperandSpecs:
        """Say how the operands of the global call are split over the mesh.

        Args:
            call: after padding.
            mask: of that call, bound.
        """
        spec = partial(partition_spec, shape=self.shape)
        kv = spec(f"B{self.kv_letter()}KH")
        given = bias_letters(call.bias) if call.bias else None, mask.leaf_axes()
        more = *given, level_letters(call, mask)
        of_more = jax.tree.map(lambda letters: spec(self.mask_letters(letters)), more)
        letters = "BTNH", "BSKH", "BSKH", *more
        return OperandSpecs(letters, (spec("BTNH"), kv, kv, *of_more), spec("BNT"))

    def local_call(self, call: Call) -> Call:
        """Return the call that the kernel sees on one device, without its bias."""
        tensor = ways("N", self.shape)
        return call.derived(
            batch=call.batch // ways("B", self.shape),
            q_len=-(-call.q_len // ways("T", self.shape)),
            heads=call.heads // tensor,
            kv_heads=call.kv_heads // tensor,
            bias=None,
        )

    def kernel_call(self, call: Call) -> Call:
        """Return the call of one run of the kernel, from the (local) call of a device."""
        return call

    # ---- what `explain` prints -------------------------------------------------------------------

    def label(self) -> str:
        """Return the strategy's name and devices."""
        return f"{self.name} over {ways('T', self.shape)}"

    def backward_line(self, kernel: Kernel, call: Call) -> str:
        """Say how the strategy launches the kernel's backward; "" where the kernel does.

        Args:
            kernel: the plan's.
            call: of one run of it.
        """
        return ""

    def notes(self) -> tuple[str, ...]:
        """Return what else the user should know."""
        return ()

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name every transfer, forward and backward."""
        raise NotImplementedError

    # ---- inside `shard_map` ----------------------------------------------------------------------

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        """Return this device's (out, lse)."""
        raise NotImplementedError

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's (dq, dk, dv, dbias).

        dk and dv are summed over the context axis; dbias is this device's share of its sum.
        """
        raise NotImplementedError


def bias_letters(bias: tuple[int, ...] | None) -> str:
    """Name the axes of a bias: its letter where it is full, "1" where it broadcasts."""
    return "".join(c if n > 1 else "1" for c, n in zip("BNTS", bias or (1, 1, 1, 1), strict=True))


def level_letters(call: Call, mask: Mask) -> str | None:
    """Name the axes of the level of a bias, as `bias_letters`; None without a bias.

    Args:
        call: whose bias.
        mask: of that call, bound.
    """
    return bias_letters(level_shape(call.bias, mask, call.q_len)) if call.bias else None


def bias_axes(
    bias: tuple[int, ...] | None, shape: MeshShape, strategy: Strategy
) -> tuple[str, ...]:
    """Name the mesh axes over which a bias gradient is summed: they split the call, not the bias.

    Args:
        bias: the global shape; a local one cannot tell a broadcast axis from a share of size 1.
    """
    if bias is None:
        return ()
    split = strategy.mask_letters(bias_letters(bias))
    kept = {a for letter in split for a in LETTERS.get(letter, ())}
    return tuple(a for a, _ in shape if a in {*BATCH_AXES, CONTEXT, "tensor"} - kept)


def bias_collectives(call: Call, shape: MeshShape, strategy: Strategy) -> tuple[Collective, ...]:
    """Name the sum of the bias gradient, where there is one."""
    axes = bias_axes(call.bias, shape, strategy)
    split = strategy.mask_letters(bias_letters(call.bias))
    share = prod(
        -(-n // ways(letter, shape)) for n, letter in zip(call.bias or (), split, strict=False)
    )
    return (Collective("psum", axes, "dbias", "backward", 4 * share),) if axes else ()


def itemsize(dtype: str) -> int:
    """Return the bytes of one element."""
    return jax.numpy.dtype(dtype).itemsize


def kv_bytes(call: Call, size: int) -> int:
    """Count the bytes of K and V of a call, in elements of `size` bytes."""
    return call.batch * call.kv_len * call.kv_heads * (call.head_dim + call.value_dim) * size
