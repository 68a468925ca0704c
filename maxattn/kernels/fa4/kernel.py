"""FlashAttention-4 on NVIDIA GPUs, through fa4-jax: what `flash` is there.

Bands skip the tiles they leave empty. Any other mask of positions becomes lists of tiles on Hopper
GPUs: empty ones are skipped, full ones are not tested. Elsewhere, and for segment ids alone, pairs
are tested in the tiles of the narrowest band around the mask.

Source: Dao-AILab, flash-attention (CuTe kernels); fa4-jax.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels import mask_split
from maxattn.kernels.base import Grads, Inputs, Lines, Offset, Result, Rows
from maxattn.kernels.dq_accumulator import DqAccumulator
from maxattn.kernels.fa4 import (
    backward_steps,
    block_sparse,
    dq_accumulator,
    mask_inputs,
    primitives,
    ring_waves,
    split_queries,
)
from maxattn.kernels.fa4.launch_order import PROCESSORS
from maxattn.kernels.fa4.tile_sizes import SMALL, backward_tile, stays, takes_lists
from maxattn.kernels.fused import masks
from maxattn.kernels.fused.kernel import Fused, Lengths, Pairs, pad_heads
from maxattn.kernels.fused.pieces import Piece, fits_shards
from maxattn.kernels.kv_block import KeySplit
from maxattn.kernels.requirements import untested
from maxattn.kernels.softmax import NEG_INF
from maxattn.masks import Full, Mask
from maxattn.target import Target

OWN = "the library's own"


@dataclass(frozen=True)
class Fa4(Fused):
    """Compute out = softmax(scale * q k^T) v with FlashAttention-4.

    Args:
        version: of fa4-jax.
        tests_pairs: whether pairs are tested, since no band says the mask.
        launched: whether the library's kernels are launched as we want them, which goes on Hopper
            GPUs.
        lists: whether the kernel gets lists of the tiles to visit.
        sharded: whether the positions are known on the device alone.
        processors: of the GPU: how many rows of tiles run at a time.
    """

    name: ClassVar[str] = "flash"
    version: str = ""
    tests_pairs: bool = False
    launched: bool = False
    lists: bool = False
    sharded: bool = False
    processors: int = PROCESSORS

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse where fa4-jax is missing, float32, head dims over 256, a bias, tables of pairs."""
        if target.version("fa4-jax") is None:
            rule = (
                "fa4-jax is not installed, and flash on an NVIDIA GPU is FlashAttention-4"
                " through it"
            )
            return Reason(
                "flash", "package", rule, 'pip install "maxattn[fa4]" (Python 3.12 or newer)'
            )
        most = target.device.family.fa4_head_dim
        reason = untested("flash", "fa4-jax", target) or masks.refuse_call("flash", call, most)
        if reason is not None or masks.refuse_mask("flash", masks.split(call.mask)) is None:
            return reason
        parts = mask_split.split(call.mask)
        return parts if isinstance(parts, Reason) else None

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Refuse: gradients are added up in no fixed order."""
        rule = "its backward adds gradients up in no fixed order"
        return Reason("flash", "deterministic", rule, masks.REMEDY)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Fa4:
        """Take the scale, whether the LSE is asked for, and how the mask goes in."""
        parts = masks.split(call.mask)
        cut = not call.sharded or fits_shards(parts, call.q_len, call.kv_len)
        pairs = masks.refuse_mask("flash", parts) is not None or not cut
        version = target.version("fa4-jax") or ""
        launched = takes_lists(version, target.device)
        lists = pairs and launched and not mask_inputs.positions(call.mask).is_full
        many = target.device.sms
        return Fa4(call.scale, call.return_lse, version, pairs, launched, lists, call.sharded, many)

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        runs = f"flash (FlashAttention-4, fa4-jax {self.version})"
        if self.lists:
            return Lines(runs, mask_inputs.lists_line(call, self.sharded))
        blocks = OWN + ("; the mask is tested pair by pair" if self.tests_pairs else "")
        if not call.mask.is_full:
            return Lines(runs, blocks)
        blocks = _whole_line(call) if self._stays(call.head_dim, call.kv_len) else blocks
        backward = self._backward_line(call)
        return Lines(runs, blocks, backward if backward != blocks else "")

    def _backward_line(self, call: Call) -> str:
        """Say how the backward over all pairs is launched."""
        tail = split_queries.tail_for(*shapes_of(call), self.processors) if self.launched else None
        return OWN if tail is None else f"{OWN}; {tail.line}"

    def _stays(self, head_dim: int, keys: int) -> bool:
        """Tell whether a forward over all pairs goes through our launch: where threads that stay
        can gain.
        """
        return self.launched and stays(head_dim, keys / SMALL.keys)

    def _tests(self, mask: Mask) -> bool:
        """Tell whether this mask is tested pair by pair: a strategy may have dropped what forbids
        nothing here.
        """
        parts = masks.split(mask)
        return self.tests_pairs and bool(parts.positions or parts.rest)

    def forward(self, inputs: Inputs) -> Result:
        """Return (out [B,T,N,H], lse [B,N,T])."""
        if not self._tests(inputs.mask):
            return super().forward(inputs)
        q, k, v, _, mask, q_offset, kv_offset = inputs.operands
        width = q.shape[3]
        q, k, v = (pad_heads(x) for x in (q, k, v))
        piece, pairs = self._tested(mask, q, k, q_offset, kv_offset)
        out, lse = self.piece_forward(q, k, v, piece, pairs)
        return Result(out[..., :width], lse)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv, None) from a given LSE and output."""
        if not self._tests(inputs.mask):
            return super().backward(inputs, rows)
        q, k, v, _, mask, q_offset, kv_offset = inputs.operands
        out, lse, dout, dlse = rows.operands
        width = q.shape[3]
        q, k, v, out, dout = (pad_heads(x) for x in (q, k, v, out, dout))
        piece, pairs = self._tested(mask, q, k, q_offset, kv_offset)
        if not mask_inputs.all_see(pairs):
            # A row that sees nothing anywhere has no gradient; its P is exp(-inf - 1e30) = 0 here.
            dout = jnp.where((lse == NEG_INF).swapaxes(1, 2)[..., None], 0, dout)
        dout = dout.astype(q.dtype)
        dq, dk, dv = self._backward(q, k, v, piece, pairs, out.astype(q.dtype), lse, dout, dlse)
        return Grads(dq[..., :width].astype(q.dtype), dk[..., :width], dv[..., :width])

    def _tested(
        self, mask: Mask, q: Array, k: Array, q_offset: Offset, kv_offset: Offset
    ) -> tuple[Piece, Pairs]:
        """Return the rectangle to go through, and what to test in it."""
        listed = self.lists and not mask_inputs.positions(mask).is_full
        return (mask_inputs.listed if listed else mask_inputs.pairs_of)(
            mask, q, k, q_offset, kv_offset
        )

    @staticmethod
    def may_keep_dq(call: Call, platform: str) -> bool:
        """Tell whether its accumulator could keep dQ in one float32 array."""
        return dq_accumulator.may_fit(call)

    def accumulator(self, inputs: Inputs, rows: Rows) -> DqAccumulator:
        """Keep dQ in one float32 array over all blocks, where the launches fit the shapes."""
        if self._keeps_dq(inputs) and backward_steps.made_apart():
            return dq_accumulator.Fa4DqAccumulator(self.scale, inputs, rows)
        return super().accumulator(inputs, rows)

    def accumulator_line(self, inputs: Inputs) -> str:
        """Say how the accumulator launches."""
        return f"{OWN}, block by block" if self._keeps_dq(inputs) else ""

    def split_keys(self, inputs: Inputs, blocks: int) -> KeySplit:
        """Divide keys so that last waves are full, on Hopper GPUs; elsewhere in halves."""
        halved = super().split_keys(inputs, blocks)
        if not self.launched or not self._keeps_dq(inputs):
            return halved
        batch, length, heads, head_dim = inputs.k.shape
        tile = backward_tile(head_dim).keys
        made = ring_waves.split_keys(length, tile, batch * heads, blocks, self.processors)
        # Spare keys stand between a block's batch rows: the forward would have to copy K and V out.
        fits = made.middle and (batch == 1 or not made.spare_keys)
        return made if fits else halved

    def _keeps_dq(self, inputs: Inputs) -> bool:
        """Tell whether the accumulator keeps dQ for arrays of these shapes."""
        return not self.lse_gradient and dq_accumulator.fits(inputs)

    def piece_forward(
        self, q: Array, k: Array, v: Array, piece: Piece, lengths: Lengths
    ) -> tuple[Array, Array]:
        """Return (out, lse) of one rectangle."""
        if isinstance(lengths, Pairs) and lengths.tiles is not None:
            found: mask_inputs.Tiles = lengths.tiles
            own = (
                found.tiling.forward,
                found.test,
                mask_inputs.arrays(lengths),
                self.scale,
                found.tiles[0],
            )
            return block_sparse.forward(q, k, v, *own)
        if piece.is_full and lengths is not None and not isinstance(lengths, Pairs):
            return primitives.fa4_forward_lengths(q, k, v, lengths, self.scale)
        if lengths is None and piece.is_full and self._stays(q.shape[3], k.shape[1]):
            tile = mask_inputs.tile_of(Full(), q.shape[3], (q.shape[1], k.shape[1]))
            return block_sparse.whole(q, k, v, self.scale, tile)
        t, s, band = _fitted(piece, q.shape[1], k.shape[1])
        pairs = _as_pairs(lengths, q.shape[1], k.shape[1])
        out, lse = primitives.fa4_forward(q[:, :t], k[:, :s], v[:, :s], band, pairs, self.scale)
        after = (0, q.shape[1] - t)
        out = jnp.pad(out, ((0, 0), after, (0, 0), (0, 0))) if after[1] else out
        return out, (
            jnp.pad(lse, ((0, 0), (0, 0), after), constant_values=NEG_INF) if after[1] else lse
        )

    def piece_backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        out: Array,
        lse: Array,
        dout: Array,
        piece: Piece,
        lengths: Lengths,
    ) -> tuple[Array, Array, Array]:
        """Return (dq, dk, dv) of one rectangle."""
        if isinstance(lengths, Pairs) and lengths.tiles is not None:
            found: mask_inputs.Tiles = lengths.tiles
            own = (
                found.tiling.backward,
                found.test,
                mask_inputs.arrays(lengths),
                self.scale,
                found.tiles[1],
            )
            return block_sparse.backward(q, k, v, out, lse, dout, *own)
        if piece.is_full and lengths is not None and not isinstance(lengths, Pairs):
            return primitives.fa4_backward_lengths(q, k, v, out, lse, dout, lengths, self.scale)
        if lengths is None and piece.is_full and self.launched:
            return split_queries.backward(q, k, v, out, lse, dout, self.scale, self.processors)
        t, s, band = _fitted(piece, q.shape[1], k.shape[1])
        pairs = _as_pairs(lengths, q.shape[1], k.shape[1])
        rows = (out[:, :t], lse[:, :, :t], dout[:, :t])
        dq, dk, dv = primitives.fa4_backward(
            q[:, :t], k[:, :s], v[:, :s], *rows, band, pairs, self.scale
        )
        return _longer(dq, q.shape[1]), _longer(dk, k.shape[1]), _longer(dv, k.shape[1])


def shapes_of(call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of q and k as the library gets them, head dims padded."""
    width = -(-call.head_dim // 8) * 8
    return (call.batch, call.q_len, call.heads, width), (
        call.batch,
        call.kv_len,
        call.kv_heads,
        width,
    )


def launches_parts(call: Call, target: Target) -> bool:
    """Tell whether a call's backward is launched in parts."""
    plain = call.mask.is_full and takes_lists(target.version("fa4-jax") or "", target.device)
    return plain and split_queries.tail_for(*shapes_of(call), target.device.sms) is not None


def _whole_line(call: Call) -> str:
    """Say how the forward over all pairs is launched."""
    tile = mask_inputs.tile_of(Full(), call.head_dim, (call.q_len, call.kv_len))
    several = block_sparse.order(*shapes_of(call), None, tile, forward=True).stays
    return f"{tile.queries}x{tile.keys} tiles" + (
        ", threads that stay from row to row" if several else ""
    )


def _fitted(p: Piece, t: int, s: int) -> tuple[int, int, tuple[int | None, int | None]]:
    """Return (queries, keys, band) as the library counts a band: query 0 stands at key S - T.

    Keys that no query sees, and queries that see none, are left out, so that neither side of the
    band is negative.
    """
    if p.is_full:
        return t, s, (None, None)
    if p.right is not None:
        s = min(s, t + p.right)
    if p.left is not None:
        t = min(t, s + p.left)
    move = s - t
    right = None if p.right is None else p.right - move
    return t, s, (None if p.left is None else p.left + move, right)


def _longer(x: Array, length: int) -> Array:
    extra = length - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) if extra else x


def _as_pairs(lengths: Lengths, t: int, s: int) -> Pairs | None:
    """Write lengths beside a band as ids: 0 for real keys, and for all queries."""
    if lengths is None or isinstance(lengths, Pairs):
        return lengths
    past = (jnp.arange(s, dtype=jnp.int32)[None] >= lengths[:, None]).astype(jnp.int32)
    return Pairs(None, None, jnp.zeros((lengths.shape[0], t), jnp.int32), past)
