"""Ulysses: devices exchange heads for tokens: a longer sequence with fewer heads on each.

`ulysses`: an all-to-all over the context axis gives each device all tokens of N / n heads; the
kernel runs; another all-to-all gives the tokens back. `ulysses_ring`: groups of neighbouring
devices exchange heads, and the groups are the ranks of a ring.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509); Fang and Zhao, USP (arXiv 2405.07719).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.block_sizes.sizes import divisors
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import CONTEXT, Collective, Strategy, bias_letters, itemsize
from maxattn.context_parallel.ring.head_halves import Heads, of_rows, operands
from maxattn.context_parallel.ring.ring import Ring
from maxattn.jax_private.all_to_all import all_to_all
from maxattn.kernels.base import Bias, Grads, Inputs, Kernel, Result, Rows
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target


@dataclass(frozen=True)
class Ulysses(Strategy):
    """Exchange heads for tokens over the whole context axis.

    Args:
        shape: the mesh's axes.
        inner: what attends to the exchanged arrays: a ring whose ranks are the groups of devices
            that exchange heads. With one group it is a ring of one, which sends nothing.
        chunks: groups of heads that are exchanged one after the other, so that one can travel while
            another computes.
    """

    name: ClassVar[str] = "ulysses"
    shape: MeshShape
    inner: Ring
    chunks: int = 1

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        """Let all devices of the context axis exchange."""
        return cls._of(Ring(shape, group=ways("S", shape)), config, call)

    @classmethod
    def _of(cls, inner: Ring, config: AttentionConfig, call: Call) -> Self:
        """Take the most chunks, up to what is asked for, of whole heads and key heads."""
        shares, asked = inner.head_ways(), config.ulysses_attention_chunks
        both = gcd(call.heads // shares, lcm(call.kv_heads, shares) // shares)
        chunks = max((c for c in divisors(both, 1) if c <= asked), default=1)
        return cls(inner.shape, inner, chunks)

    def supports(self, call: Call) -> Reason | None:
        """Refuse groups that divide neither the context axis nor the heads."""
        n, group, tensor = ways("S", self.shape), self.inner.group, ways("N", self.shape)
        if n % group:
            rule = f"ulysses_shards={group} must divide the context axis, {n}"
            fits = ", ".join(map(str, divisors(n, 1)))
            return Reason(self.name, "ulysses_shards", rule, f"set it to one of {fits}")
        if call.heads % (group * tensor) == 0:
            return self.inner.supports(call)
        sizes = [] if call.heads % tensor else _group_sizes(n, call.heads // tensor)
        fits = " or ".join(str(u) for u in sizes if u > 1)
        rule = (
            f"{call.heads} heads must be a multiple of {group * tensor} (exchanging"
            f" {group} x tensor {tensor})"
        )
        groups = f"ulysses_ring with ulysses_shards: {fits}, or " if fits else ""
        return Reason(self.name, "heads", rule, f"take {groups}ring in its place")

    # ---- the layout, which is the inner strategy's -----------------------------------------------

    @property
    def chunks_per_rank(self) -> int:
        return self.inner.chunks_per_rank

    def unit(self) -> int:
        return self.inner.unit()

    def head_ways(self) -> int:
        return self.inner.head_ways()

    def kv_letter(self) -> str:
        """Keys are split over context until they are exchanged."""
        return "S"

    def mask_letters(self, letters: str) -> str:
        """Masks and biases stay whole: each device slices the part that it attends with."""
        return letters.replace("S", ".").replace("T", ".")

    def local_call(self, call: Call) -> Call:
        """Return a group's tokens, this device's share of the heads."""
        return self.inner.local_call(call)

    def kernel_call(self, call: Call) -> Call:
        """One group of heads is computed at a time."""
        heads, kv_heads = call.heads // self.chunks, call.kv_heads // self.chunks
        return call.derived(heads=heads, kv_heads=kv_heads)

    # ---- what `explain` prints -------------------------------------------------------------------

    def label(self) -> str:
        """Name the groups too, where there are several."""
        ring = self.inner
        groups = f" ({ring.ring_size} groups of {ring.group})" if ring.ring_size > 1 else ""
        return super().label() + ring.order_label + groups

    def backward_line(self, kernel: Kernel, call: Call) -> str:
        return self.inner.backward_line(kernel, call)

    def notes(self) -> tuple[str, ...]:
        return self.inner.notes()

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the exchanges and, with more than one group, the ring's hops."""
        hops = self.inner.collectives(call) if self.inner.ring_size > 1 else ()
        exchanges = self._exchanges(call) if self.inner.group > 1 else ()
        return *exchanges, *(replace(c, hops=c.hops * self.chunks) for c in hops)

    def _exchanges(self, call: Call) -> tuple[Collective, ...]:
        local, group = self.inner.rank_call(call), self.inner.group
        rows, item = local.batch * local.heads, itemsize(local.dtype)
        # Bytes that a device receives of one token of all heads, of q and of out.
        dims = local.head_dim, local.value_dim
        units = [rows * dim * item * (group - 1) // group for dim in dims]
        q, out = (local.q_len * unit for unit in units)
        kv = local.kv_len * sum(units) * local.kv_heads // local.heads
        stats = 4 * rows * local.q_len * (group - 1) // group
        made = (
            ("Q,K,V,out,LSE", "forward", q + out + kv + stats, 5),
            ("Q,K,V,out,dout,LSE,dLSE", "backward", q + 2 * out + kv + 2 * stats, 7),
            ("dQ,dK,dV", "backward", q + kv, 3),
        )
        return tuple(
            Collective("all_to_all", (CONTEXT,), what, when, size, self.chunks, arrays)
            for what, when, size, arrays in made
        )

    # ---- inside `shard_map` ----------------------------------------------------------------------

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        outs, lses = [], []
        for part in self._parts(inputs):
            out, lse = self.inner.forward(kernel, part.inputs(inputs))
            outs.append(part.swapped(out, 1, 2))
            lses.append(part.swapped(lse, 2, 1))
        return Result(jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=1))

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's gradients; the bias's is its share of a sum over context."""
        grads: list[list[Array]] = [[], [], []]
        dbias = None if inputs.bias is None else jnp.zeros_like(inputs.bias, jnp.float32)
        for part in self._parts(inputs):
            *found, db = self.inner.backward(kernel, part.inputs(inputs), part.rows(rows))
            for total, x in zip(grads, found, strict=True):
                total.append(part.swapped(x, 1, 2))
            dbias = part.add_bias(dbias, db)
        dq, dk, dv = (jnp.concatenate(x, axis=2) for x in grads)
        return Grads(dq, dk, dv, dbias)

    def _parts(self, inputs: Inputs) -> list[Exchange]:
        each = [Heads(i, self.chunks) for i in range(self.chunks)]
        return [Exchange(heads, self.inner.group, self.inner.ring_size, inputs.q) for heads in each]


@dataclass(frozen=True)
class UlyssesRing(Ulysses):
    """Exchange heads within groups of devices, and send K and V round the groups."""

    name: ClassVar[str] = "ulysses_ring"

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        """Take the group from `ulysses_shards`, or the largest part of context that fits."""
        group = config.ulysses_shards
        if group <= 0:
            sizes = _group_sizes(ways("S", shape), call.heads // ways("N", shape))
            group = max(sizes, default=1)
        built = cls._of(Ring(shape, group=group), config, call)
        if built.supports(call):
            return built
        inner = Ring.of_groups(group, shape, config, call, target, built.chunks)
        return replace(built, inner=inner)


def _group_sizes(devices: int, heads: int) -> list[int]:
    """List the proper divisors of the devices that divide the heads, in rising order."""
    return [u for u in divisors(gcd(devices, heads), 1) if u < devices]


class Exchange:
    """Give heads away for tokens, and back, inside `shard_map`.

    Args:
        heads: those that are exchanged.
        devices: how many exchange.
        ring_size: groups of so many on the context axis.
        q: this device's queries, before the exchange.
    """

    def __init__(self, heads: Heads, devices: int, ring_size: int, q: Array) -> None:
        self.heads, self.devices = heads, devices
        groups = [[rank * devices + i for i in range(devices)] for rank in range(ring_size)]
        self.groups = groups if ring_size > 1 else None
        device, length = jax.lax.axis_index(CONTEXT), q.shape[1] * devices
        rank, share = (
            (device // devices if ring_size > 1 else 0),
            q.shape[2] // heads.parts // devices,
        )
        # The start and the length of this device's share of a mask or bias that is whole, for each
        # axis that is split.
        self.spans: dict[str, tuple[Any, int]] = {
            "N": ((heads.part * devices + device % devices) * share, share),
            "T": (rank * length, length),
        }

    def inputs(self, inputs: Inputs) -> Inputs:
        """Give heads away for tokens, and slice the bias and the mask."""
        part = operands(self.heads, inputs)
        q, k, v = (self.swapped(x, 2, 1) for x in (part.q, part.k, part.v))
        mask = jax.tree.map(self._sliced, inputs.mask, inputs.mask.leaf_axes())
        both = inputs.bias, inputs.bias_level
        bias, level = (x if x is None else self._sliced(x, bias_letters(x.shape)) for x in both)
        return Inputs(q, k, v, bias, mask, bias_level=level)

    def rows(self, rows: Rows) -> Rows:
        """Give heads away for tokens."""
        out, lse, dout, dlse = of_rows(self.heads, rows).operands
        out, dout = (self.swapped(x, 2, 1) for x in (out, dout))  # [B, T, N, H]
        lse, dlse = (self.swapped(x, 1, 2) for x in (lse, dlse))  # [B, N, T]
        return Rows(out, lse, dout, dlse)

    def swapped(self, x: Array, split: int, join: int) -> Array:
        """Split one axis over the devices, and join what they send along another."""
        return x if self.devices == 1 else all_to_all(x, CONTEXT, split, join, self.groups)

    def add_bias(self, total: Bias, part: Bias) -> Bias:
        """Add the gradient of a sliced bias where it was sliced from."""
        if total is None or part is None:
            return None
        starts = [self.spans.get(letter, (0,))[0] for letter in bias_letters(total.shape)]
        old = jax.lax.dynamic_slice(total, starts, part.shape)
        return jax.lax.dynamic_update_slice(total, old + part, starts)

    def _sliced(self, x: Any, letters: str) -> Array:
        """Slice this device's share of the axes of queries and heads."""
        for axis, letter in enumerate(letters):
            if letter in self.spans:
                start, size = self.spans[letter]
                x = jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, size, axis)
        return x
