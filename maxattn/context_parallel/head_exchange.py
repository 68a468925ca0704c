"""The all-to-all of Ulysses: give heads away for tokens, and back, inside `shard_map`."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.context_parallel.base import CONTEXT
from maxattn.jax_private.all_to_all import all_to_all
from maxattn.kernels.base import Bias, Inputs, Rows
from maxattn.masks import Mask


class HeadGroup(NamedTuple):
    """Name one group of a device's heads, before the exchange."""

    start: int
    count: int
    kv_start: int
    kv_count: int

    def keys(self, x: Array) -> Array:
        """Slice the group out of K or V."""
        end = self.kv_start + self.kv_count
        return jax.lax.slice_in_dim(x, self.kv_start, end, axis=2)

    def queries(self, x: Array) -> Array:
        """Slice the group out of an array [B, T, N, H]."""
        return jax.lax.slice_in_dim(x, self.start, self.start + self.count, axis=2)

    def stats(self, x: Array) -> Array:
        """Slice the group out of an array [B, N, T]."""
        return jax.lax.slice_in_dim(x, self.start, self.start + self.count, axis=1)


class Exchange(NamedTuple):
    """Exchange one group of heads.

    Attributes:
        heads: the group.
        devices: how many exchange.
        groups: the devices of each exchange; None where all of the context axis exchange.
        spans: the start and the length of this device's share of a mask or bias that is whole, for
            each axis that is split.
    """

    heads: HeadGroup
    devices: int
    groups: list[list[int]] | None
    spans: dict[str, tuple[Any, int]]

    @staticmethod
    def of(devices: int, ring_size: int, heads: HeadGroup, q: Array) -> Exchange:
        """Find this device's share.

        Args:
            devices: how many exchange.
            ring_size: groups of so many on the context axis.
            heads: the group of heads.
            q: this device's queries, before the exchange.
        """
        groups = [[rank * devices + i for i in range(devices)] for rank in range(ring_size)]
        device, share = jax.lax.axis_index(CONTEXT), heads.count // devices
        rank, length = (device // devices if ring_size > 1 else 0), q.shape[1]
        spans = {
            "N": (heads.start + device % devices * share, share),
            "T": (rank * length * devices, length * devices),
        }
        return Exchange(heads, devices, groups if ring_size > 1 else None, spans)

    # ---- arrays ----------------------------------------------------------------------------------

    def inputs(self, inputs: Inputs) -> Inputs:
        """Give heads away for tokens, and slice the bias and the mask."""
        sliced = self.heads.queries(inputs.q), *map(self.heads.keys, (inputs.k, inputs.v))
        q, k, v = (self.to_heads(x) for x in sliced)
        bias, level = self._of_bias(inputs.bias), self._of_bias(inputs.bias_level)
        return Inputs(q, k, v, bias, self._of_mask(inputs.mask), bias_level=level)

    def rows(self, rows: Rows) -> Rows:
        """Give heads away for tokens."""
        wide = [self.heads.queries(x) for x in (rows.out, rows.dout)]
        out, dout = (self.to_heads(x) for x in wide)
        stats = [self.heads.stats(x) for x in (rows.lse, rows.dlse)]
        lse, dlse = (self._swapped(x, 1, 2) for x in stats)  # [B, N, T]
        return Rows(out, lse, dout, dlse)

    def to_heads(self, x: Array) -> Array:
        """Give heads away for tokens: [B, T, N, H]."""
        return self._swapped(x, 2, 1)

    def to_tokens(self, x: Array) -> Array:
        """Give tokens away for heads: [B, T, N, H]."""
        return self._swapped(x, 1, 2)

    def stats_to_tokens(self, x: Array) -> Array:
        """Give tokens away for heads: [B, N, T]."""
        return self._swapped(x, 2, 1)

    def _swapped(self, x: Array, split: int, join: int) -> Array:
        """Split one axis over the devices, and join what they send along another."""
        return x if self.devices == 1 else all_to_all(x, CONTEXT, split, join, self.groups)

    # ---- masks and biases ------------------------------------------------------------------------

    def add_bias(self, total: Bias, part: Bias) -> Bias:
        """Add the gradient of a sliced bias where it was sliced from."""
        if total is None or part is None:
            return None
        starts = [self.spans[c][0] if c in self.spans else 0 for c in _full_axes(total)]
        old = jax.lax.dynamic_slice(total, starts, part.shape)
        return jax.lax.dynamic_update_slice(total, old + part, starts)

    def _of_mask(self, mask: Mask) -> Mask:
        return jax.tree.map(self._sliced, mask, mask.leaf_axes())

    def _of_bias(self, bias: Bias) -> Bias:
        return None if bias is None else self._sliced(bias, _full_axes(bias))

    def _sliced(self, x: Any, letters: str) -> Array:
        """Slice this device's share of the axes of queries and heads."""
        for axis, letter in enumerate(letters):
            if letter in self.spans:
                start, size = self.spans[letter]
                x = jax.lax.dynamic_slice_in_dim(jnp.asarray(x), start, size, axis)
        return x


def _full_axes(bias: Array) -> str:
    return "".join(c if n > 1 else "1" for c, n in zip("BNTS", bias.shape, strict=True))
