"""Lay out one call for splash: heads first, lengths padded to tiles, `vmap` over batch rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.block_sizes import DKV, DQ, FORWARD, BlockSizes
from maxattn.kernels.base import Offset, in_default_modes
from maxattn.kernels.softmax import BIG_LSE
from maxattn.kernels.splash.mask_codes import Codes
from maxattn.kernels.splash.mask_info import codes_of
from maxattn.masks.terms import KEY_PAD, SplitMask, segment_ids
from maxattn.masks.tile_kinds import Kinds, tile_kinds
from maxattn.sharding import pad_axis

Blocks = tuple[int, ...]  # block sizes (q, kv, kv_compute); (q, kv) for a separate dq kernel
Ids = tuple[Array, Array] | None  # segment ids of queries and keys


class Operands(NamedTuple):
    """The operands of every splash kernel, for one batch row or with a leading batch axis."""

    q: Array  # queries [N, T, H], multiplied by the scale
    # k, v: keys and values [K, S, H]
    k: Array
    v: Array
    ids: Ids  # segment ids [T] and [S], or None


class Stats(NamedTuple):
    """The additional operands of a backward kernel.

    Args:
        lse, delta: [N, T] float32, finite; delta is sum(dout * out) - dlse.
        dout: the output's gradient [N, T, H], 0 for queries that see no key.
    """

    lse: Array
    dout: Array
    delta: Array


class Library:
    """The kernels of one splash library; each computes one batch row, padded to tiles."""

    def query_factor(self, dtype: Any) -> float:
        """Return the factor, besides the scale, that queries are multiplied by; dk contains it."""
        return 1.0

    def forward(self, row: Operands, setup: Setup, blocks: Blocks) -> tuple[Array, Array]:
        """Return (out [N, T, H], natural-log LSE [N, T]), with LSE < -1e37 if no key was seen."""
        raise NotImplementedError

    def dkv(
        self, row: Operands, stats: Stats, setup: Setup, blocks: Blocks, fused: bool
    ) -> tuple[Array | None, Array, Array]:
        """Return (dq if fused else None, dk, dv)."""
        raise NotImplementedError

    def dq(self, row: Operands, stats: Stats, setup: Setup, blocks: Blocks) -> Array:
        """Return dq; a library that has only a fused backward does not define this method."""
        raise NotImplementedError


@dataclass(frozen=True)
class SplashProblem:
    """The operands of one call, and the mask, library and cores that all its kernels share."""

    q: Array  # [B, N, T, H], multiplied by the scale
    # k, v: [B, K, S, H]
    k: Array
    v: Array
    parts: SplitMask  # the mask, split into positions, segment ids and padding
    # q_offset, kv_offset: positions of the first local query and key
    q_offset: Offset
    kv_offset: Offset
    library: Library  # the splash library that has the kernels
    cores: int = 1  # number of a device's cores, which share the parallel axes of a kernel's grid
    # whether one launch of the library's backward computes all batch rows
    rows_at_once: bool = False

    def forward(self, sizes: BlockSizes) -> tuple[Array, Array]:
        """Return (out [B, N, T, H], lse [B, N, T]); both are garbage for queries without keys."""
        out, lse = self.forward_of(_of(sizes, FORWARD))
        return out[:, :, : self.q_len], lse[:, :, : self.q_len]

    def forward_of(self, blocks: Blocks) -> tuple[Array, Array]:
        """Return (out, lse), padded to whole tiles."""
        setup = self._setup(blocks)
        run = jax.vmap(in_default_modes(lambda row: self.library.forward(row, setup, blocks)))
        return run(setup.operands(self))

    def backward(self, sizes: BlockSizes, stats: Stats) -> tuple[Array, Array, Array]:
        """Return (dq [B, N, T, H] of the scaled queries, dk and dv [B, K, S, H])."""
        fused = bool(sizes.use_fused_bwd_kernel)
        dq, dk, dv = self.dkv(_of(sizes, DKV), stats, fused)
        if dq is None:
            dq = self.dq(_of(sizes, DQ), stats)
        return dq[:, :, : self.q_len], dk[:, :, : self.kv_len], dv[:, :, : self.kv_len]

    def dkv(self, blocks: Blocks, stats: Stats, fused: bool) -> tuple[Array | None, Array, Array]:
        """Return (dq if fused else None, dk, dv), padded to whole tiles."""
        setup = self._setup(blocks)
        dkv = self.library.dkv
        run = in_default_modes(lambda row, stats: dkv(row, stats, setup, blocks, fused))
        return self._over_cores(run if self.rows_at_once else jax.vmap(run), setup, stats)

    def dq(self, blocks: Blocks, stats: Stats) -> Array:
        """Return the dq of the separate backward, padded to whole tiles."""
        setup = self._setup(blocks)
        run = in_default_modes(lambda row, stats: self.library.dq(row, stats, setup, blocks))
        return self._over_cores(jax.vmap(run), setup, stats)

    def _over_cores(self, run: Callable[..., Any], setup: Setup, stats: Stats) -> Any:
        """Run a backward with groups of heads as batch rows, the only axis that cores share."""
        batch, heads = self.q.shape[:2]
        groups = self.cores // gcd(batch, self.cores)
        if heads % groups or self.k.shape[1] % groups:
            groups = 1
        operands, stats = setup.operands(self), setup.stats(stats)
        ids = jax.tree.map(lambda x: jnp.repeat(x, groups, axis=0), operands.ids)
        q, k, v = _regrouped(operands[:3], groups, batch)
        done = run(Operands(q, k, v, ids), _regrouped(stats, groups, batch))
        return _regrouped(done, 1, batch)

    @property
    def q_len(self) -> int:
        """The number of local queries without padding."""
        return self.q.shape[2]

    @property
    def kv_len(self) -> int:
        """The number of local keys without padding."""
        return self.k.shape[2]

    def checked(self, x: Array) -> Array:
        """Return `x`, or NaN if the offsets do not fit the queries' codes (mask_codes.py).

        A plan refuses too long sequences. Traced offsets are known only on the device: they do not
        fit above 2**20, or if the key offset is no multiple of the shard length. No strategy has
        such offsets.
        """
        codes = self._setup((self.q_len, self.kv_len)).codes
        if codes is None or codes.valid is None:
            return x
        return jnp.where(codes.valid, x, jnp.nan)

    def _setup(self, blocks: Blocks) -> Setup:
        positions, lengths = self.parts.positions, (self.q_len, self.kv_len)
        offsets = self.q_offset, self.kv_offset
        bq, bkv = blocks[:2]
        padded = -(-self.q_len // bq) * bq, -(-self.kv_len // bkv) * bkv
        kinds = tile_kinds(positions, bq, bkv, *lengths, *offsets)
        # If there are segment ids, they hide padded keys too.
        shows_padding = padded[1] > self.kv_len and not self.parts.has_ids
        codes = codes_of(positions, kinds, *lengths, shows_padding, *offsets)
        ids = segment_ids(self.parts, self.q.shape[0], *lengths, self.kv_offset)
        return Setup(kinds, codes, ids, padded, shows_padding)


@dataclass(frozen=True)
class Setup:
    """The mask of one kernel, prepared for the kernel's block sizes."""

    kinds: Kinds  # EMPTY, FULL or MIXED for each tile
    codes: Codes | None  # the queries' codes (mask_codes.py); None if every pair is allowed
    ids: Ids  # segment ids [B, T] and [B, S], or None
    padded: tuple[int, int]  # T and S after padding to whole tiles
    # whether tiles with padded keys must evaluate the mask function to hide them
    shows_padding: bool = False

    @property
    def code(self) -> Callable[..., Any] | None:
        """The mask function that the kernel calls, or None if every pair is allowed."""
        return None if self.codes is None else self.codes.code

    def operands(self, problem: SplashProblem) -> Operands:
        """Pad the operands to whole tiles; the segment ids of padded keys match no query's id."""
        t, s = self.padded
        k, v = (pad_axis(x, 2, s) for x in (problem.k, problem.v))
        return Operands(pad_axis(problem.q, 2, t), k, v, self.padded_ids())

    def padded_ids(self) -> Ids:
        """Pad the segment ids; padded queries repeat the last id, so that full tiles stay full."""
        if self.ids is None:
            return None
        q_ids, kv_ids = self.ids
        q_ids = jnp.pad(q_ids, ((0, 0), (0, self.padded[0] - q_ids.shape[1])), mode="edge")
        return q_ids, pad_axis(kv_ids, 1, self.padded[1], KEY_PAD)

    def stats(self, stats: Stats) -> Stats:
        """Pad a backward's operands so that padded queries add nothing to a gradient."""
        t = self.padded[0]
        lse, dout, delta = stats
        return Stats(pad_axis(lse, 2, t, BIG_LSE), pad_axis(dout, 2, t), pad_axis(delta, 2, t))


def _regrouped(arrays: Any, groups: int, batch: int) -> Any:
    """Split the heads of each array [b, n, ...], in order, into groups that become batch rows."""
    rows = batch * groups
    return jax.tree.map(lambda x: x.reshape(rows, -1, *x.shape[2:]), arrays)


def _of(sizes: BlockSizes, keys: tuple[str, ...]) -> Blocks:
    found = sizes.part(keys)
    assert found is not None, (sizes, keys)  # `Splash.of` makes sizes for training
    return found
