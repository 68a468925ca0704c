"""Ulysses: devices exchange heads for tokens, so that each attends over a longer sequence with
fewer heads.

`ulysses`: an all-to-all over the context axis gives each device all tokens of N / n heads; the
kernel runs; another all-to-all gives the tokens back. `ulysses_ring`: groups of `inner` neighbours
exchange heads, and the groups form a ring.

Source: Jacobs et al., DeepSpeed Ulysses (arXiv 2309.14509); Fang and Zhao, USP (arXiv 2405.07719).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import lcm
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.all_gather import CONTEXT
from maxattn.context_parallel.base import Collective, itemsize
from maxattn.context_parallel.ring.ring import Ring
from maxattn.kernels.base import Bias, Grads, Inputs, Kernel, Result, Rows
from maxattn.masks import Mask
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target


@dataclass(frozen=True)
class UlyssesRing(Ring):
    """Exchange heads for tokens within groups of `inner` devices, and send K and V round the
    groups.

    Args:
        shape: the mesh's axes.
        inner: devices that exchange heads.
        chunks: groups of heads that are exchanged one after the other, so that one can travel while
            another computes.
    """

    name: ClassVar[str] = "ulysses_ring"
    chunks: int = 1

    @classmethod
    def build(
        cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target
    ) -> UlyssesRing:
        """Take the group from `ulysses_shards`, or the largest part of the context axis that
        divides the heads.
        """
        n, heads = ways("S", shape), call.heads // ways("N", shape)
        parts = [u for u in range(1, n) if n % u == 0 and heads % u == 0]
        inner = config.ulysses_shards if config.ulysses_shards > 0 else max(parts, default=1)
        chunks = _chunks(config.ulysses_attention_chunks, call, ways("N", shape) * inner)
        built = cls(shape, inner, chunks=chunks)
        return built if built.supports(call) else built.balanced(call, target)

    def label(self) -> str:
        """Name the groups too, where there are several."""
        groups = f" ({self.places} groups of {self.inner})" if self.places > 1 else ""
        return super().label() + groups

    def supports(self, call: Call) -> Reason | None:
        """Refuse groups that divide neither the context axis nor the heads, naming sizes that
        do.
        """
        n, heads, tensor = ways("S", self.shape), call.heads, ways("N", self.shape)
        if n % self.inner:
            rule = f"ulysses_shards={self.inner} must divide the context axis, {n}"
            return Reason(self.name, "ulysses_shards", rule, f"set it to one of {_divisors(n)}")
        if heads % (self.inner * tensor):
            rule = (
                f"{heads} heads must be a multiple of {self.inner * tensor} (exchanging"
                f" {self.inner} x tensor {tensor})"
            )
            fits = ", ".join(str(u) for u in range(1, heads + 1) if heads % (u * tensor) == 0)
            return Reason(
                self.name,
                "heads",
                rule,
                f"exchange heads among {fits} devices, or set context_parallel: ring",
            )
        return None

    def head_ways(self) -> int:
        """Count the shares of the heads during attention."""
        return ways("N", self.shape) * self.inner

    def mask_letters(self, letters: str) -> str:
        """Queries and keys of a mask or bias stay whole: each device takes the part that it attends
        with.
        """
        return letters.replace("S", ".").replace("T", ".")

    def place_call(self, call: Call) -> Call:
        """Return the call of one hop: the group's queries and keys, this device's share of the
        heads.
        """
        local = super().place_call(call)
        heads, kv_heads = local.heads // self.inner, local.kv_heads // self.inner
        return replace(local, q_len=call.q_len // self.places, heads=heads, kv_heads=kv_heads)

    def kernel_call(self, call: Call) -> Call:
        """One group of heads is computed at a time."""
        return replace(call, heads=call.heads // self.chunks, kv_heads=call.kv_heads // self.chunks)

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the exchanges and, with more than one group, the ring's hops."""
        local = self.place_call(call)
        unit = (
            local.batch
            * local.heads
            * local.head_dim
            * itemsize(call.dtype)
            * (self.inner - 1)
            // self.inner
        )
        kv = 2 * local.kv_len * unit * local.kv_heads // local.heads
        q = local.q_len * unit
        stats = 4 * local.batch * local.heads * local.q_len * (self.inner - 1) // self.inner
        exchanges = (
            ("Q,K,V,out,LSE", "forward", 2 * q + kv + stats, 5),
            ("Q,K,V,out,dout,LSE,dLSE", "backward", 3 * q + kv + 2 * stats, 7),
            ("dQ,dK,dV", "backward", q + kv, 3),
        )
        made = [
            Collective("all_to_all", (CONTEXT,), w, when, b, self.chunks, n)
            for w, when, b, n in exchanges
        ]
        rounds = super().collectives(call) if self.places > 1 else ()
        return (
            *(made if self.inner > 1 else ()),
            *(replace(c, hops=c.hops * self.chunks) for c in rounds),
        )

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        """Return this device's (out, lse)."""
        outs, lses = [], []
        for heads in self._head_groups(inputs.q, inputs.k):
            part = _Exchange(self, heads, inputs.q)
            out, lse = super().forward(kernel, part.inputs(heads, inputs))
            outs.append(part.back(out))
            lses.append(part.back_stats(lse))
        return Result(jnp.concatenate(outs, axis=2), jnp.concatenate(lses, axis=1))

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        """Return this device's gradients; the bias's is its share of a sum over the context
        axis.
        """
        grads: list[list[Array]] = [[], [], []]
        dbias = None if inputs.bias is None else jnp.zeros_like(inputs.bias, jnp.float32)
        for heads in self._head_groups(inputs.q, inputs.k):
            part = _Exchange(self, heads, inputs.q)
            *g, db = super().backward(kernel, part.inputs(heads, inputs), part.rows(heads, rows))
            for total, x in zip(grads, g, strict=True):
                total.append(part.back(x))
            dbias = part.add_bias(dbias, db)
        dq, dk, dv = (jnp.concatenate(x, axis=2) for x in grads)
        return Grads(dq, dk, dv, dbias)

    def _head_groups(self, q: Array, k: Array) -> list[_Heads]:
        n, kv = q.shape[2] // self.chunks, k.shape[2] // self.chunks
        return [_Heads(i * n, n, i * kv, kv) for i in range(self.chunks)]


@dataclass(frozen=True)
class Ulysses(UlyssesRing):
    """Exchange heads for tokens over the whole context axis."""

    name: ClassVar[str] = "ulysses"

    @classmethod
    def build(
        cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target
    ) -> Ulysses:
        """Let all devices of the context axis exchange."""
        n = ways("S", shape)
        return cls(
            shape, n, chunks=_chunks(config.ulysses_attention_chunks, call, ways("N", shape) * n)
        )


@dataclass(frozen=True)
class _Heads:
    """One group of this device's heads, before the exchange."""

    start: int
    count: int
    kv_start: int
    kv_count: int

    def of(self, q: Array, k: Array, v: Array) -> list[Array]:
        return [*self.of_queries(q), *(jax.lax.slice_in_dim(x, *self._kv, axis=2) for x in (k, v))]

    def of_queries(self, *xs: Array) -> list[Array]:
        return [jax.lax.slice_in_dim(x, self.start, self.start + self.count, axis=2) for x in xs]

    def of_stats(self, *xs: Array) -> list[Array]:
        return [jax.lax.slice_in_dim(x, self.start, self.start + self.count, axis=1) for x in xs]

    @property
    def _kv(self) -> tuple[int, int]:
        return self.kv_start, self.kv_start + self.kv_count


class _Exchange:
    """The exchange of one group of heads, and where its share lies in a mask or bias that is
    whole.
    """

    def __init__(self, ring: UlyssesRing, heads: _Heads, q: Array) -> None:
        self.inner = ring.inner
        groups = [
            [place * ring.inner + i for i in range(ring.inner)] for place in range(ring.places)
        ]
        self.groups = groups if ring.places > 1 else None
        device = jax.lax.axis_index(CONTEXT)
        share = heads.count // ring.inner
        place = device // ring.inner if ring.places > 1 else 0
        # The start and the length of this device's share along each axis that is cut.
        self.spans = {
            "N": (heads.start + device % ring.inner * share, share),
            "T": (place * q.shape[1] * ring.inner, q.shape[1] * ring.inner),
        }

    def _swap(self, x: Array, split: int, join: int) -> Array:
        if self.inner == 1:
            return x
        return jax.lax.all_to_all(
            x, CONTEXT, split, join, axis_index_groups=self.groups, tiled=True
        )

    def inputs(self, heads: _Heads, inputs: Inputs) -> Inputs:
        """Give heads away for tokens, and cut the bias and the mask."""
        q, k, v = (self.out(x) for x in heads.of(inputs.q, inputs.k, inputs.v))
        return Inputs(q, k, v, self.cut_bias(inputs.bias), self.cut_mask(inputs.mask))

    def rows(self, heads: _Heads, rows: Rows) -> Rows:
        """Give heads away for tokens."""
        out, dout = (self.out(x) for x in heads.of_queries(rows.out, rows.dout))
        lse, dlse = (self.out_stats(x) for x in heads.of_stats(rows.lse, rows.dlse))
        return Rows(out, lse, dout, dlse)

    def out(self, x: Array) -> Array:
        """Give heads away for tokens: [B, T, N, H]."""
        return self._swap(x, 2, 1)

    def back(self, x: Array) -> Array:
        """Give tokens away for heads: [B, T, N, H]."""
        return self._swap(x, 1, 2)

    def out_stats(self, x: Array) -> Array:
        """Give heads away for tokens: [B, N, T]."""
        return self._swap(x, 1, 2)

    def back_stats(self, x: Array) -> Array:
        """Give tokens away for heads: [B, N, T]."""
        return self._swap(x, 2, 1)

    def cut(self, x: Any, letters: str) -> Array:
        """Cut the axes of queries and heads to this device's share."""
        for axis, letter in enumerate(letters):
            if letter in self.spans:
                start, size = self.spans[letter]
                x = jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, size, axis)
        return x

    def cut_mask(self, mask: Mask) -> Mask:
        """Cut the arrays of a mask."""
        return jax.tree.map(self.cut, mask, mask.leaf_axes())

    def cut_bias(self, bias: Bias) -> Bias:
        """Cut a bias."""
        return None if bias is None else self.cut(bias, _full_axes(bias))

    def add_bias(self, total: Bias, part: Bias) -> Bias:
        """Add the gradient of a cut bias where it was cut from."""
        if total is None or part is None:
            return None
        starts = [self.spans[c][0] if c in self.spans else 0 for c in _full_axes(total)]
        old = jax.lax.dynamic_slice(total, starts, part.shape)
        return jax.lax.dynamic_update_slice(total, old + part, starts)


def _full_axes(bias: Array) -> str:
    return "".join(c if n > 1 else "1" for c, n in zip("BNTS", bias.shape, strict=True))


def _chunks(asked: int, call: Call, shares: int) -> int:
    """Return the most groups, up to what was asked, that leave each share of the heads whole heads
    and key heads.
    """
    heads, kv_heads = call.heads // shares, lcm(call.kv_heads, shares) // shares
    return max((c for c in range(1, asked + 1) if heads % c == 0 and kv_heads % c == 0), default=1)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
