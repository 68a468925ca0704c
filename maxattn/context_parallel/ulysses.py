"""Ulysses: devices exchange heads for tokens, so that each has a longer sequence of fewer heads.

`ulysses`: an all-to-all over the context axis gives each device all tokens of N / n heads; the
kernel runs; another all-to-all gives the tokens back. `ulysses_ring`: groups of neighbouring
devices exchange heads, and each group is a rank of a ring.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509); Fang and Zhao, USP (arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd, lcm
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.block_sizes.sizes import divisors
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import CONTEXT, Collective, array_bytes, bias_letters
from maxattn.context_parallel.ring.choices import choose
from maxattn.context_parallel.ring.head_halves import Heads, of_rows, operands
from maxattn.context_parallel.ring.ring import Ring
from maxattn.jax_private.all_to_all import all_to_all
from maxattn.kernels.base import Bias, Grads, Inputs, Kernel, Result, Rows
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target


@dataclass(frozen=True)
class Ulysses(Ring):
    """Exchange heads for tokens over the whole context axis.

    The class is a ring whose ranks are groups of devices that exchange heads. With one group, the
    ring has one rank and sends nothing.
    """

    name: ClassVar[str] = "ulysses"
    # number of equal parts of the heads that are exchanged one after the other: one part travels
    # while another is computed. For the other arguments see `Ring`.
    chunks: int = 1

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        return cls(shape, group=ways("S", shape)).in_chunks(config, call)

    def in_chunks(self, config: AttentionConfig, call: Call) -> Self:
        """Use the most chunks of whole query and key heads, up to `ulysses_attention_chunks`."""
        shares, asked = self.head_ways(), config.ulysses_attention_chunks
        both = gcd(call.heads // shares, lcm(call.kv_heads, shares) // shares)
        return replace(self, chunks=max((c for c in divisors(both, 1) if c <= asked), default=1))

    def supports(self, call: Call) -> Reason | None:
        """Refuse groups whose size does not divide the context axis or the heads."""
        n, group, tensor = ways("S", self.shape), self.group, ways("N", self.shape)
        if n % group:
            rule = f"ulysses_shards={group} must divide the size of the context axis, {n}"
            fits = ", ".join(map(str, divisors(n, 1)))
            return Reason(self.name, "ulysses_shards", rule, f"set ulysses_shards to one of {fits}")
        if call.heads % (group * tensor) == 0:
            return super().supports(call)
        sizes = [] if call.heads % tensor else _group_sizes(n, call.heads // tensor)
        fits = " or ".join(str(u) for u in sizes if u > 1)
        axes = f"{group} devices that exchange heads, times the tensor axis of {tensor}"
        rule = f"the {call.heads} query heads must be a multiple of {group * tensor}: {axes}"
        groups = f", or context_parallel: ulysses_ring with ulysses_shards: {fits}" if fits else ""
        return Reason(self.name, "heads", rule, f"set context_parallel: ring{groups}")

    # ---- the layout, besides the ring's part -----------------------------------------------------

    def mask_letters(self, letters: str) -> str:
        """Replace the letters of both token axes by ".": each device slices its own part."""
        return letters.replace("S", ".").replace("T", ".")

    def kernel_call(self, call: Call) -> Call:
        """Return the call of one chunk of heads."""
        heads, kv_heads = call.heads // self.chunks, call.kv_heads // self.chunks
        return call.derived(heads=heads, kv_heads=kv_heads)

    # ---- what `explain` prints -------------------------------------------------------------------

    def label(self) -> str:
        groups = f" ({self.ring_size} groups of {self.group})" if self.ring_size > 1 else ""
        return super().label() + groups

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """List the exchanges and, with more than one group, the ring's hops."""
        group, sizes = self.group, array_bytes(self.rank_call(call))

        def exchange(what: str, when: str) -> Collective:
            names = what.split(",")
            received = sum(sizes[name] for name in names) * (group - 1) // group
            return Collective(
                "all_to_all", (CONTEXT,), what, when, received, self.chunks, len(names)
            )

        hops = super().collectives(call) if self.ring_size > 1 else ()
        made = tuple(replace(c, hops=c.hops * self.chunks) for c in hops)
        if group == 1:
            return made
        return (
            exchange("Q,K,V,out,LSE", "forward"),
            exchange("Q,K,V,out,dout,LSE,dLSE", "backward"),
            exchange("dQ,dK,dV", "backward"),
            *made,
        )

    # ---- inside `shard_map` ----------------------------------------------------------------------

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        outs, lses = [], []
        for part in self._parts(inputs):
            out, lse = super().forward(kernel, part.inputs(inputs))
            outs.append(part.swapped(out, 1, 2))
            lses.append(part.swapped(lse, 2, 1))
        return Result(jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=1))

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        grads: list[list[Array]] = [[], [], []]
        dbias = None if inputs.bias is None else jnp.zeros_like(inputs.bias, jnp.float32)
        for part in self._parts(inputs):
            *found, db = super().backward(kernel, part.inputs(inputs), part.rows(rows))
            for total, x in zip(grads, found, strict=True):
                total.append(part.swapped(x, 1, 2))
            dbias = part.add_bias(dbias, db)
        dq, dk, dv = (jnp.concatenate(x, axis=2) for x in grads)
        return Grads(dq, dk, dv, dbias)

    def _parts(self, inputs: Inputs) -> Iterator[Exchange]:
        for i in range(self.chunks):
            yield Exchange(Heads(i, self.chunks), self.group, self.ring_size, inputs.q)


@dataclass(frozen=True)
class UlyssesRing(Ulysses):
    """Exchange heads within groups of devices, and send K and V round the groups."""

    name: ClassVar[str] = "ulysses_ring"

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        """Form groups of `ulysses_shards` devices; by default, the most that divide the heads."""
        group = config.ulysses_shards
        if group <= 0:
            sizes = _group_sizes(ways("S", shape), call.heads // ways("N", shape))
            group = max(sizes, default=1)
        built = cls.of_groups(group, shape, target).in_chunks(config, call)
        return built if built.supports(call) else choose(built, call, config, target)


def _group_sizes(devices: int, heads: int) -> list[int]:
    """List the proper divisors of the devices that divide the heads, in rising order."""
    return [u for u in divisors(gcd(devices, heads), 1) if u < devices]


class Exchange:
    """Exchange heads for tokens among devices, and back, inside `shard_map`.

    The context axis has `ring_size` groups of `devices`; `q` is the queries before the exchange.
    """

    def __init__(self, heads: Heads, devices: int, ring_size: int, q: Array) -> None:
        self.heads, self.devices = heads, devices
        groups = [[rank * devices + i for i in range(devices)] for rank in range(ring_size)]
        self.groups = groups if ring_size > 1 else None
        device, length = jax.lax.axis_index(CONTEXT), q.shape[1] * devices
        rank = device // devices if ring_size > 1 else 0
        share = q.shape[2] // heads.parts // devices
        # The start and the length of this device's part of a whole mask or bias, by split axis.
        self.spans: dict[str, tuple[Any, int]] = {
            "N": ((heads.part * devices + device % devices) * share, share),
            "T": (rank * length, length),
        }

    def inputs(self, inputs: Inputs) -> Inputs:
        """Exchange heads of the operands for tokens, and slice the bias and the mask."""
        part = operands(self.heads, inputs)
        q, k, v = (self.swapped(x, 2, 1) for x in (part.q, part.k, part.v))
        mask = jax.tree.map(self._sliced, inputs.mask, inputs.mask.leaf_axes())
        both = inputs.bias, inputs.bias_level
        bias, level = (x if x is None else self._sliced(x, bias_letters(x.shape)) for x in both)
        return Inputs(q, k, v, bias, mask, bias_level=level)

    def rows(self, rows: Rows) -> Rows:
        """Exchange heads of the backward's `Rows` for tokens."""
        out, lse, dout, dlse = of_rows(self.heads, rows).operands
        out, dout = (self.swapped(x, 2, 1) for x in (out, dout))  # [B, T, N, H]
        lse, dlse = (self.swapped(x, 1, 2) for x in (lse, dlse))  # [B, N, T]
        return Rows(out, lse, dout, dlse)

    def swapped(self, x: Array, split: int, join: int) -> Array:
        """All-to-all: split axis `split` over the devices, and join along axis `join`."""
        return x if self.devices == 1 else all_to_all(x, CONTEXT, split, join, self.groups)

    def add_bias(self, total: Bias, part: Bias) -> Bias:
        """Add the gradient of a sliced bias to the same slice of `total`."""
        if total is None or part is None:
            return None
        # Equal dtypes, in 64-bit mode too.
        firsts = (self.spans.get(letter, (0,))[0] for letter in bias_letters(total.shape))
        starts = [jnp.asarray(first, jnp.int32) for first in firsts]
        old = jax.lax.dynamic_slice(total, starts, part.shape)
        return jax.lax.dynamic_update_slice(total, old + part, starts)

    def _sliced(self, x: Any, letters: str) -> Array:
        """Slice this device's part of the axes of queries and heads."""
        for axis, letter in enumerate(letters):
            if letter in self.spans:
                start, size = self.spans[letter]
                x = jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, size, axis)
        return x
