"""Ulysses: devices exchange heads for tokens: a longer sequence with fewer heads on each.

`ulysses`: an all-to-all over the context axis gives each device all tokens of N / n heads; the
kernel runs; another all-to-all gives the tokens back. `ulysses_ring`: groups of neighbouring
devices exchange heads, and the groups are the ranks of a ring.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509); Fang and Zhao, USP (arXiv 2405.07719).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import ClassVar, Self

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.block_sizes.sizes import divisors
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import CONTEXT, Collective, Strategy, itemsize
from maxattn.context_parallel.head_exchange import Exchange, HeadGroup
from maxattn.context_parallel.ring.ring import Ring
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target

AXES = (CONTEXT,)


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
        """Exchange heads within the groups of a ring."""
        chunks = _chunks(config.ulysses_attention_chunks, call, inner.head_ways())
        return cls(inner.shape, inner, chunks)

    def with_kernel(self, kernel: Kernel, call: Call) -> Self:
        """Let the inner strategy ask the kernel."""
        return replace(self, inner=self.inner.with_kernel(kernel, self.kernel_call(call)))

    def supports(self, call: Call) -> Reason | None:
        """Refuse groups that divide neither the context axis nor the heads."""
        n, group, shares = ways("S", self.shape), self.inner.group, self.inner.head_ways()
        if n % group:
            rule = f"ulysses_shards={group} must divide the context axis, {n}"
            fits = ", ".join(map(str, divisors(n, 1)))
            return Reason(self.name, "ulysses_shards", rule, f"set it to one of {fits}")
        return self._refuse_heads(call.heads) if call.heads % shares else self.inner.supports(call)

    def _refuse_heads(self, heads: int) -> Reason:
        """Name sizes of groups that divide the heads, and ring."""
        tensor, group, n = ways("N", self.shape), self.inner.group, ways("S", self.shape)
        sizes = [] if heads % tensor else _group_sizes(n, heads // tensor)
        fits = " or ".join(str(u) for u in sizes if u > 1)
        rule = (
            f"{heads} heads must be a multiple of {group * tensor} (exchanging"
            f" {group} x tensor {tensor})"
        )
        groups = f"ulysses_ring with ulysses_shards: {fits}, or " if fits else ""
        remedy = f"take {groups}ring in its place"
        return Reason(self.name, "heads", rule, remedy)

    # ---- the layout ------------------------------------------------------------------------------

    @property
    def chunks_per_rank(self) -> int:
        """Contiguous chunks of the sequence that a group holds."""
        return self.inner.chunks_per_rank

    def unit(self) -> int:
        """Lengths are padded as the inner strategy needs them."""
        return self.inner.unit()

    def head_ways(self) -> int:
        """Count the shares of the heads during attention."""
        return self.inner.head_ways()

    def kv_letter(self) -> str:
        """Keys are split over context until they are exchanged."""
        return "S"

    def mask_letters(self, letters: str) -> str:
        """Masks and biases stay whole: each device slices the part that it attends with."""
        return letters.replace("S", ".").replace("T", ".")

    def local_call(self, call: Call) -> Call:
        """Return the inner strategy's: a group's tokens, this device's share of the heads."""
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

    def backward_line(self) -> str:
        """Say how the inner strategy launches the kernel's backward."""
        return self.inner.backward_line()

    def notes(self) -> tuple[str, ...]:
        """Say what the inner strategy says."""
        return self.inner.notes()

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the exchanges and, with more than one group, the ring's hops."""
        hops = self.inner.collectives(call) if self.inner.ring_size > 1 else ()
        exchanges = self._exchanges(call) if self.inner.group > 1 else ()
        return *exchanges, *(replace(c, hops=c.hops * self.chunks) for c in hops)

    def _exchanges(self, call: Call) -> tuple[Collective, ...]:
        q, out, kv, stats = self._received(self.inner.rank_call(call))
        made = (
            ("Q,K,V,out,LSE", "forward", q + out + kv + stats, 5),
            ("Q,K,V,out,dout,LSE,dLSE", "backward", q + 2 * out + kv + 2 * stats, 7),
            ("dQ,dK,dV", "backward", q + kv, 3),
        )
        return tuple(
            Collective("all_to_all", AXES, what, when, size, self.chunks, arrays)
            for what, when, size, arrays in made
        )

    def _received(self, local: Call) -> tuple[int, int, int, int]:
        """Count the bytes that a device receives of q, out, k and v together, and the LSE."""
        group, rows, item = self.inner.group, local.batch * local.heads, itemsize(local.dtype)
        dims = local.head_dim, local.value_dim
        units = [rows * dim * item * (group - 1) // group for dim in dims]
        kv = local.kv_len * sum(units) * local.kv_heads // local.heads
        q, out = (local.q_len * unit for unit in units)
        return q, out, kv, 4 * rows * local.q_len * (group - 1) // group

    # ---- inside `shard_map` ----------------------------------------------------------------------

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        """Return this device's (out, lse)."""
        outs, lses = [], []
        for heads in self._head_groups(inputs):
            part = Exchange.of(self.inner.group, self.inner.ring_size, heads, inputs.q)
            out, lse = self.inner.forward(kernel, part.inputs(inputs))
            outs.append(part.to_tokens(out))
            lses.append(part.stats_to_tokens(lse))
        return Result(jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=1))

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's gradients; the bias's is its share of a sum over context."""
        grads: list[list[Array]] = [[], [], []]
        dbias = None if inputs.bias is None else jnp.zeros_like(inputs.bias, jnp.float32)
        for heads in self._head_groups(inputs):
            part = Exchange.of(self.inner.group, self.inner.ring_size, heads, inputs.q)
            *found, db = self.inner.backward(kernel, part.inputs(inputs), part.rows(rows))
            for total, x in zip(grads, found, strict=True):
                total.append(part.to_tokens(x))
            dbias = part.add_bias(dbias, db)
        dq, dk, dv = (jnp.concatenate(x, axis=2) for x in grads)
        return Grads(dq, dk, dv, dbias)

    def _head_groups(self, inputs: Inputs) -> list[HeadGroup]:
        n, kv = (x.shape[2] // self.chunks for x in (inputs.q, inputs.k))
        return [HeadGroup(i * n, n, i * kv, kv) for i in range(self.chunks)]


@dataclass(frozen=True)
class UlyssesRing(Ulysses):
    """Exchange heads within groups of devices, and send K and V round the groups."""

    name: ClassVar[str] = "ulysses_ring"

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        """Take the group from `ulysses_shards`, or the largest part of context that fits."""
        group = config.ulysses_shards
        if group <= 0:
            group = _largest_group(ways("S", shape), call.heads // ways("N", shape))
        built = cls._of(Ring(shape, group=group), config, call)
        if built.supports(call):
            return built
        inner = Ring.of_groups(group, shape, config, call, target, built.chunks)
        return replace(built, inner=inner)


def _largest_group(devices: int, heads: int) -> int:
    """Return the largest proper divisor of the devices that divides the heads."""
    return max(_group_sizes(devices, heads), default=1)


def _group_sizes(devices: int, heads: int) -> list[int]:
    """List the proper divisors of the devices that divide the heads, in rising order."""
    return [u for u in divisors(gcd(devices, heads), 1) if u < devices]


def _chunks(asked: int, call: Call, shares: int) -> int:
    """Return the most chunks, up to what was asked, of whole heads and key heads.

    Args:
        asked: the setting.
        call: whose heads.
        shares: of the heads, which the chunks divide.
    """
    heads, kv_heads = call.heads // shares, lcm(call.kv_heads, shares) // shares
    return max((c for c in divisors(gcd(heads, kv_heads), 1) if c <= asked), default=1)
