"""The base class of strategies: how Q, K and V move between devices around a kernel."""

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
from maxattn.kernels.softmax import gradient_dtype
from maxattn.masks import KeyLimit, Mask
from maxattn.sharding import BATCH_AXES, LETTERS, MeshShape, partition_spec, ways
from maxattn.target import Target

CONTEXT = "context"
"""The mesh axis that the sequence is split over."""
FLOAT = 4
"""Bytes of a float32."""


def readable(size: float) -> str:
    """Write a number of bytes with a unit, as `160 MiB`."""
    units = ["B", "KiB", "MiB", "GiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if 999.5 <= size < 1024 else f"{size:.3g} {units[0]}"


@dataclass(frozen=True)
class Collective:
    """One transfer of a plan."""

    kind: str  # "all_gather", "psum", "pmax", "psum_scatter", "ppermute" or "all_to_all"
    axes: tuple[str, ...]  # the mesh axes that the transfer runs over
    what: str  # names of the arrays that move, joined by commas
    when: str  # "forward" or "backward"
    bytes: int  # bytes that one device receives in all hops
    hops: int = 1  # how often the transfer runs; default 1
    arrays: int = 1  # number of arrays that move each time; default 1

    def __str__(self) -> str:
        times = f" {self.hops} hops," if self.hops > 1 else ""
        return (
            f"{self.what} {self.kind} over {'+'.join(self.axes)},{times} {readable(self.bytes)},"
            f" {self.when}"
        )


class OperandSpecs(NamedTuple):
    """Shardings of q, k, v, the bias, the mask and the bias level (kernels/bias_level.py)."""

    letters: tuple[Any, ...]  # the letters of each array's axes, such as "BTNH"
    specs: tuple[Any, ...]  # the partition spec of each array
    lse: PartitionSpec  # the partition spec of the LSE; the output has the spec of q


class Strategy:
    """Run a kernel's forward and backward on shards of q, k and v, inside `shard_map`.

    Every strategy is a frozen dataclass. The defaults split the queries over the context axis and
    give each device all keys.
    """

    name: ClassVar[str]  # the value of the setting `context_parallel`
    shape: MeshShape  # (axis, size) of each mesh axis

    # ---- before the call -------------------------------------------------------------------------

    @classmethod
    def build(
        cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target
    ) -> Strategy:
        """Return the strategy for one global call, with all its choices made."""
        raise NotImplementedError

    def supports(self, call: Call) -> Reason | None:
        """Return None if the strategy can run the call, else the reason why it cannot."""
        return None

    # ---- the layout ------------------------------------------------------------------------------

    @property
    def chunks_per_rank(self) -> int:
        """Number of contiguous chunks of the sequence on a device."""
        return 1

    def unit(self) -> int:
        """Return the number that padded lengths of queries and sharded keys are multiples of."""
        return ways("T", self.shape)

    def head_ways(self) -> int:
        """Return how many devices the key heads are split over while a kernel runs."""
        return ways("N", self.shape)

    def kv_letter(self) -> str:
        """Return "S" if the keys are split over context, "." if they are replicated."""
        return "."

    def mask_letters(self, letters: str) -> str:
        """Replace by "." the letters of a mask's or bias's axes that are replicated."""
        return letters.replace("S", ".")

    def padded_call(self, call: Call) -> Call:
        """Return the call with lengths and key heads that divide over the devices."""
        q_len, kv_len = (-(-n // self.unit()) * self.unit() for n in (call.q_len, call.kv_len))
        kv_len = kv_len if self.kv_letter() == "S" else call.kv_len
        mask = call.mask & KeyLimit(call.kv_len) if kv_len > call.kv_len else call.mask
        kv_heads = lcm(call.kv_heads, self.head_ways())
        return call.derived(q_len=q_len, kv_len=kv_len, kv_heads=kv_heads, mask=mask)

    def operand_specs(self, call: Call, mask: Mask) -> OperandSpecs:
        """Return the shardings of the operands of a padded global call with its bound mask."""
        spec = partial(partition_spec, shape=self.shape)
        kv = spec(f"B{self.kv_letter()}KH")
        bias = level = None
        if call.bias:
            bias = bias_letters(call.bias)
            level = bias_letters(level_shape(call.bias, mask, call.q_len))
        more = bias, mask.leaf_axes(), level
        of_more = jax.tree.map(lambda letters: spec(self.mask_letters(letters)), more)
        letters = "BTNH", "BSKH", "BSKH", *more
        return OperandSpecs(letters, (spec("BTNH"), kv, kv, *of_more), spec("BNT"))

    def local_call(self, call: Call) -> Call:
        """Return the call on one device's shards, without the bias."""
        tensor = ways("N", self.shape)
        return call.derived(
            batch=call.batch // ways("B", self.shape),
            q_len=-(-call.q_len // ways("T", self.shape)),
            heads=call.heads // tensor,
            kv_heads=call.kv_heads // tensor,
            bias=None,
        )

    def kernel_call(self, call: Call) -> Call:
        """Return the call of a single kernel run, from a device's local call."""
        return call

    # ---- what `explain` prints -------------------------------------------------------------------

    def label(self) -> str:
        """Return the strategy's name and its number of devices."""
        return f"{self.name} over {ways('T', self.shape)}"

    def backward_line(self, kernel: Kernel, call: Call) -> str:
        """Describe a kernel's backward launches if the strategy changes them, else ""."""
        return ""

    def notes(self) -> tuple[str, ...]:
        """Return the strategy's notes for the user."""
        return ()

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """List every transfer of a padded global call, forward and backward."""
        raise NotImplementedError

    # ---- inside `shard_map` ----------------------------------------------------------------------

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        """Return this device's (out, lse)."""
        raise NotImplementedError

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return a device's gradients; dk and dv are summed over the context axis, dbias is not."""
        raise NotImplementedError


def bias_letters(bias: tuple[int, ...] | None) -> str:
    """Return the letters of a bias's axes; "1" for an axis that broadcasts."""
    return "".join(c if n > 1 else "1" for c, n in zip("BNTS", bias or (1, 1, 1, 1), strict=True))


def bias_axes(
    bias: tuple[int, ...] | None, shape: MeshShape, strategy: Strategy
) -> tuple[str, ...]:
    """Return the mesh axes that split the call, not the bias: its gradient is summed over them."""
    if bias is None:
        return ()
    split = strategy.mask_letters(bias_letters(bias))
    kept = {a for letter in split for a in LETTERS.get(letter, ())}
    return tuple(a for a, _ in shape if a in {*BATCH_AXES, CONTEXT, "tensor"} - kept)


def bias_collectives(call: Call, shape: MeshShape, strategy: Strategy) -> tuple[Collective, ...]:
    """Return the collective that sums the bias gradient over devices; () if none is needed."""
    axes = bias_axes(call.bias, shape, strategy)
    split = zip(call.bias or (), strategy.mask_letters(bias_letters(call.bias)), strict=False)
    share = prod(-(-n // ways(letter, shape)) for n, letter in split)
    return (Collective("psum", axes, "dbias", "backward", FLOAT * share),) if axes else ()


def range_collectives(call: Call, axes: tuple[str, ...]) -> tuple[Collective, ...]:
    """Return the maximum over `axes` that float16 gradients need (kernels/gradient_scale.py)."""
    if not axes or call.dtype != "float16":
        return ()
    return (Collective("pmax", axes, "range of dS", "backward", 6 * FLOAT * call.batch),)


def itemsize(dtype: str) -> int:
    return jax.numpy.dtype(dtype).itemsize


def gradient_itemsize(dtype: str) -> int:
    """Return the bytes of an element of dQ, dK and dV."""
    return jax.numpy.dtype(gradient_dtype(jax.ShapeDtypeStruct((), dtype))).itemsize


def kv_bytes(call: Call, size: int = FLOAT) -> int:
    """Return the bytes of K and V of a call, in elements of `size` bytes; default float32."""
    return call.batch * call.kv_len * call.kv_heads * (call.head_dim + call.value_dim) * size


def array_bytes(call: Call) -> dict[str, int]:
    """Return the bytes of each array of a local call, by its name in `Collective.what`."""
    item, queries = itemsize(call.dtype), call.batch * call.q_len * call.heads
    keys = call.batch * call.kv_len * call.kv_heads * item
    q, out = queries * item * call.head_dim, queries * item * call.value_dim
    k, v, lse = keys * call.head_dim, keys * call.value_dim, FLOAT * queries
    sizes = {"Q": q, "K": k, "V": v, "out": out, "LSE": lse}
    wider = gradient_itemsize(call.dtype) // item
    grads = {f"d{name}": sizes[name] * wider for name in "QKV"}
    return sizes | grads | {"dout": out, "dLSE": lse}
