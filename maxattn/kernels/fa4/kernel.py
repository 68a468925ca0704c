"""FlashAttention-4 on NVIDIA GPUs, through fa4-jax: what `flash` is there.

Bands skip the tiles they leave empty. Any other mask, and a band that gains by it (band_lists.py),
becomes block-sparse lists on Hopper GPUs: empty tiles are skipped, full ones are not tested.
Segment ids, flags and lengths beside positions make them on the device, for each batch row.
Elsewhere pairs are tested in the tiles of the narrowest band around the mask.

Source: Dao-AILab, flash-attention (CuTe kernels); fa4-jax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.devices import SMS
from maxattn.kernels.base import (
    USE_AUTO,
    DqAccumulator,
    Grads,
    Inputs,
    Kernel,
    Lines,
    Result,
    Rows,
    refuse_mask,
    with_batch_folded,
)
from maxattn.kernels.fa4 import (
    backward_splits,
    backward_steps,
    band_lists,
    bias,
    block_sparse,
    capabilities,
    dq_accumulator,
    fold_groups,
    int32_bounds,
    key_lengths,
    launch_lines,
    mask_inputs,
    primitives,
    split_keys,
    split_keys_forward,
    split_keys_lists,
    split_lists,
    unseen_rows,
    whole_backward,
    windows,
)
from maxattn.kernels.fa4.fold_rows import with_rows_folded
from maxattn.kernels.fa4.forward_tiles import library_tile, persistent_pays, tile_over_all
from maxattn.kernels.fa4.launch_lines import OWN
from maxattn.kernels.fa4.list_limits import MOST_ROW_TILES, MOST_TILES, fits_lists
from maxattn.kernels.fa4.split_keys_kernel import knows_operands
from maxattn.kernels.fa4.split_queries_kernel import knows_rows
from maxattn.kernels.fa4.tile_sizes import Dims, shapes_of, takes_lists
from maxattn.kernels.fused import rectangles
from maxattn.kernels.fused.kernel import Fused
from maxattn.kernels.fused.rectangles import Pairs, PieceInputs
from maxattn.masks import Mask
from maxattn.masks.band_pieces import fits_shards
from maxattn.masks.terms import sort_note, sort_terms, split_mask
from maxattn.target import Target


@dataclass(frozen=True)
class Fa4(Fused):
    """Compute out = softmax(scale * q k^T) v with FlashAttention-4.

    Args:
        version: of fa4-jax.
        tests_pairs: whether pairs are tested, since no band says the mask.
        launched: whether maxattn launches the library's kernels itself, as it can on Hopper GPUs.
        lists: whether the kernel gets block-sparse lists of the tiles to visit.
        sharded: whether the positions are known on the device alone.
        sms: streaming multiprocessors (SMs), each of which runs one thread block at a time.
        plain: computes the backward where a bias has a gradient; None where it has none.
    """

    name: ClassVar[str] = "flash"
    hides_beside_bias: ClassVar[bool] = False
    takes_any_bias: ClassVar[bool] = True
    takes_empty_rows: ClassVar[bool] = True  # it takes their LSE for 0
    version: str = ""
    tests_pairs: bool = False
    launched: bool = False
    lists: bool = False
    sharded: bool = False
    sms: int = SMS
    plain: Kernel | None = None

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse float32, long head dims, tables of pairs; `flash` found fa4-jax.

        A bias goes in on Hopper GPUs, with every mask written into it.
        """
        reason = target.refuse_untested("flash", "fa4-jax") or capabilities.refuse(
            call, target.device
        )
        terms = sort_terms(call.mask)
        reason = reason or int32_bounds.refuse(call, terms)
        if reason is None and call.bias is not None:
            return bias.refuse(call, target)
        if reason is not None or refuse_mask("flash", terms) is None:
            return reason
        found = split_mask(call.mask)
        return found if isinstance(found, Reason) else None

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Refuse: gradients are added up in no fixed order."""
        rule = "its backward adds gradients up in no fixed order"
        return Reason("flash", "deterministic", rule, USE_AUTO)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Fa4:
        """Take the scale, whether the LSE is asked for, and how the mask goes in."""
        if call.bias is not None:
            return Fa4(call.scale, call.return_lse, target.version("fa4-jax") or "")
        terms = sort_terms(call.mask)
        cut = not call.sharded or fits_shards(terms, call.q_len, call.kv_len)
        version = target.version("fa4-jax") or ""
        launched = takes_lists(version, target.device)
        rows = mask_inputs.own_rows(call)
        fits = launched and fits_lists(call.head_dim, call.q_len, call.kv_len, rows)
        # Without lists a band beside lengths is tested in all its tiles, past a row's length too.
        beside = fits and rows > 0 and bool(terms.positions and terms.keys)
        pairs = beside or not cut or refuse_mask("flash", terms) is not None
        lists = pairs and fits
        sms = target.device.sms
        return Fa4(call.scale, call.return_lse, version, pairs, launched, lists, call.sharded, sms)

    @staticmethod
    def splits_backward(call: Call, target: Target) -> bool:
        """Tell whether a call's backward is split over the queries."""
        launched = takes_lists(target.version("fa4-jax") or "", target.device)
        return launched and backward_splits.is_split(call, target.device.sms)

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        runs = f"flash (FlashAttention-4, fa4-jax {self.version})"
        if self.plain is not None:
            return Lines(runs, f"{OWN}; {bias.ADDED}", f"{OWN}; {bias.PLAIN}")
        call = replace(call, sharded=self.sharded)
        if self.lists:
            return Lines(runs, *launch_lines.lists_lines(call, self.sms))
        if self.tests_pairs:
            return Lines(runs, OWN + "; the mask is tested pair by pair")
        if self.launched and _is_of_keys(call.mask):
            tail = self._key_splits(*shapes_of(call))
            return Lines(runs, *launch_lines.lengths_lines(call, self.sms, tail))
        blocks = self._blocks_line(call)
        if not call.mask.is_full:
            forward, backward = launch_lines.split_lists_lines(call, self.sms * self.launched)
            if self.launched and not backward:
                backward = launch_lines.band_backward_line(call, self.sms)
            forward = forward or blocks
            return Lines(runs, forward, backward if {forward, backward} != {OWN} else "")
        backward = launch_lines.split_line(call, self.sms) if self.launched else OWN
        return Lines(runs, blocks, backward if backward != blocks else "")

    def _blocks_line(self, call: Call) -> str:
        """Say how the forward is launched where no pair is tested."""
        if sort_terms(call.mask).positions:
            whole = fold_groups.seen_by_all(call)
            if whole is not None and fold_groups.hides_nothing(call):
                return self._blocks_line(whole)
            return launch_lines.band_blocks_line(call, self._key_splits)
        tail = self._key_splits(*shapes_of(call))
        if tail is not None:
            return f"{launch_lines.tile_line(call)}; {tail.line}"
        whole = call.mask.is_full and self._launches_whole(*shapes_of(call))
        return launch_lines.whole_line(call) if whole else OWN

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        """Say where a mask gets no lists, and on other GPUs than Hopper's what that costs."""
        if call.bias is not None:
            return (bias.note(call),)
        if self.lists:
            return (sort_note("tiles"),) if call.mask.has_ids else ()
        if not self.tests_pairs:
            return ()
        if not self.launched:
            forbids = not mask_inputs.positions(call.mask).is_full
            return (launch_lines.band_line(call),) if forbids else ()
        rows = mask_inputs.own_rows(call)
        of = f"{MOST_ROW_TILES} tiles of all batch rows" if rows else f"{MOST_TILES} tiles"
        most = f"block-sparse lists are of up to {of}, and the call has more"
        return (f"{most}: empty tiles of the band around the mask are computed too",)

    def without_dbias(self) -> Fa4:
        """Return the kernel whose backward is FlashAttention-4's beside a bias too."""
        return replace(self, plain=None)

    def _launches_whole(self, queries: Dims, keys: Dims) -> bool:
        """Tell whether maxattn launches a forward over all pairs.

        It does where other tiles than the library's are faster, or persistent thread blocks.
        """
        tile, head_dim = tile_over_all(queries, keys), queries[3]
        pays = persistent_pays(head_dim, -(-keys[1] // tile.keys), tile)
        return self.launched and (pays or tile != library_tile(head_dim))

    def _tests(self, mask: Mask) -> bool:
        """Tell whether this mask is tested pair by pair.

        A strategy may have dropped what forbids nothing here.
        """
        terms = sort_terms(mask)
        return self.tests_pairs and bool(terms.positions or terms.rest)

    def forward(self, inputs: Inputs) -> Result:
        """Return (out [B,T,N,H], lse [B,N,T])."""
        if not self._tests(inputs.mask):
            ways = super().forward, self._tested_forward, band_lists.forward_pays
            return self._by_band(*ways, inputs)
        if self.lists and mask_inputs.has_ids(inputs.mask):
            return with_rows_folded(self._tested_forward, inputs)
        return self._tested_forward(inputs)

    def _tested_forward(self, inputs: Inputs) -> Result:
        out, lse = self.piece_forward(self._tested(rectangles.with_padded_heads(inputs)))
        return Result(out[..., : inputs.q.shape[3]], lse)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv) from a given LSE and output, and dbias where a bias has one."""
        if self.plain is not None:
            return self.plain.backward(inputs, rows)
        if not self._tests(inputs.mask):
            ways = super().backward, self._tested_backward, band_lists.backward_pays
            return self._by_band(*ways, inputs, rows)
        if self.lists and mask_inputs.has_ids(inputs.mask):
            return with_rows_folded(self._tested_backward, inputs, rows)
        return self._tested_backward(inputs, rows)

    def _by_band(self, own: Any, listed: Any, pays: Any, inputs: Inputs, *rows: Rows) -> Any:
        """Run a pass of a band: over lists, where that pays, or on its own."""

        def run(q: Array, k: Array, v: Array, *rows: Rows) -> Any:
            given = inputs.replace(q=q, k=k, v=v)
            return (listed if pays(given, self.sms) else own)(given, *rows)

        if not self.launched or not pays(inputs, self.sms):
            return own(inputs, *rows)
        return with_batch_folded(run, inputs.q, inputs.k, inputs.v, *rows)

    def _tested_backward(self, inputs: Inputs, rows: Rows) -> Grads:
        width, q = inputs.q.shape[3], inputs.q
        given = self._tested(rectangles.with_padded_heads(inputs))
        rows = rectangles.rows_for(rows, given.q)
        if not mask_inputs.all_see(given.pairs):
            # A row that sees nothing anywhere has no gradient; its P is exp(-inf - 1e30) = 0 here.
            rows = replace(rows, dout=self.clear(rows.dout, rows.lse))
        dq, dk, dv, _ = self._backward(given, rows)
        return Grads(dq[..., :width].astype(q.dtype), dk[..., :width], dv[..., :width])

    def clear(self, dout: Array, lse: Array) -> Array:
        """Return dout with 0 where the LSE is -inf: in place, where maxattn launches kernels."""
        fits = self.launched and unseen_rows.pays(dout)
        return (unseen_rows.cleared if fits else rectangles.cleared)(dout, lse)

    def _tested(self, inputs: Inputs) -> PieceInputs:
        """Return the rectangle to go through, and what to test in it."""
        by_pairs = self._tests(inputs.mask) and not self.lists
        return (mask_inputs.pairs_of if by_pairs else mask_inputs.listed)(inputs)

    @staticmethod
    def may_keep_dq(call: Call, platform: str) -> bool:
        """Tell whether its accumulator could keep dQ in one float32 array."""
        return dq_accumulator.may_fit(call)

    def accumulator(self, inputs: Inputs, rows: Rows) -> DqAccumulator:
        """Keep dQ in one float32 array over all blocks, where the launches fit the shapes."""
        if self._keeps_dq(inputs) and backward_steps.library_has_launches():
            return dq_accumulator.Fa4DqAccumulator(self.scale, inputs, rows)
        return super().accumulator(inputs, rows)

    def accumulator_line(self, inputs: Inputs) -> str:
        """Say how the accumulator launches."""
        return f"{OWN}, block by block" if self._keeps_dq(inputs) else ""

    def _keeps_dq(self, inputs: Inputs) -> bool:
        """Tell whether the accumulator keeps dQ for arrays of these shapes."""
        return not self.lse_gradient and dq_accumulator.fits(inputs)

    def piece_forward(self, inputs: PieceInputs) -> Result:
        """Return (out, lse) of one rectangle."""
        if inputs.bias is not None:
            return bias.run_forward(inputs, self.scale)
        q, pairs = inputs.q, inputs.pairs
        if pairs is not None and pairs.tiles is not None:
            return split_keys_lists.forward(inputs, pairs.tiles, self.scale, self.sms)
        if inputs.has_lengths_alone or (inputs.is_whole and self.launched):
            return with_batch_folded(self._all_pairs, inputs)
        cut, window = windows.shortened(inputs)
        found = with_batch_folded(
            partial(self._pairs_forward, cut.piece, window), *_of_batch(cut), shared=_ends(cut)
        )
        return windows.lengthened(found, q.shape[1])

    def _all_pairs(self, inputs: PieceInputs) -> Result:
        """Return (out, lse) over all pairs, or all of real keys."""
        q, k, v = inputs.q, inputs.k, inputs.v
        tail = self._key_splits(q.shape, k.shape)
        if tail is not None and knows_operands():
            return split_keys_forward.forward(inputs, self.scale, tail)
        if inputs.lengths is not None:
            run = key_lengths.forward if self.launched else primitives.fa4_forward_lengths
            return run(inputs, self.scale)
        if not self._launches_whole(q.shape, k.shape):
            return primitives.fa4_forward(inputs, primitives.NO_WINDOW, self.scale)
        tile = tile_over_all(q.shape, k.shape)
        return Result(*block_sparse.whole(q, k, v, block_sparse.TilePass(tile, self.scale)))

    def _key_splits(self, queries: Dims, keys: Dims) -> split_keys.KeySplits | None:
        """Choose the queries that are split over the keys, where maxattn launches the forward."""
        return split_keys.split_for(queries, keys, self.sms) if self.launched else None

    def _pairs_forward(self, piece: Any, window: Any, *operands: Any) -> Result:
        return primitives.fa4_forward(_joined(piece, *operands), window, self.scale)

    def _pairs_backward(self, piece: Any, window: Any, rows: Rows, *operands: Any) -> Grads:
        return primitives.fa4_backward(
            _joined(piece, *operands), rows, window, self.scale, self.launched
        )

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        """Return (dq, dk, dv) of one rectangle."""
        if inputs.bias is not None:
            return bias.run_backward(inputs, rows, self.scale)
        pairs = inputs.pairs
        if pairs is not None and pairs.tiles is not None:
            tiles: mask_inputs.BlockSparseTiles = pairs.tiles
            given = tiles.tiling.backward, inputs.q.shape, inputs.k.shape
            splits = split_lists.splits_for(*given, self.sms) if knows_rows() else 1
            return block_sparse.backward(inputs, rows, tiles.backward(pairs, self.scale, splits))
        if self.launched and fold_groups.pays_for(inputs):
            return fold_groups.with_groups_folded(self.piece_backward, inputs, rows)
        if inputs.has_lengths_alone:
            run = partial(primitives.fa4_backward_lengths, scale=self.scale)
            if self.launched:
                run = partial(key_lengths.backward, scale=self.scale, sms=self.sms)
            return with_batch_folded(run, inputs, rows)
        if inputs.is_whole and self.launched:
            return whole_backward.backward(inputs, rows, self.scale, self.sms)
        cut, window = windows.shortened(inputs)
        rows = windows.shortened_rows(rows, cut.q.shape[1])
        grads = with_batch_folded(
            partial(self._pairs_backward, cut.piece, window),
            *(rows, *_of_batch(cut)),
            shared=_ends(cut),
        )
        return windows.lengthened_grads(grads, inputs)


def _of_batch(inputs: PieceInputs) -> tuple[Any, ...]:
    """Return the arrays of a rectangle that have a batch: q, k, v and the ids of both."""
    pairs = inputs.pairs
    ids = () if pairs is None or pairs.q_ids is None else (pairs.q_ids, pairs.kv_ids)
    return inputs.q, inputs.k, inputs.v, *ids


def _ends(inputs: PieceInputs) -> tuple[Any, ...]:
    """Return the intervals of keys, which all of the batch share."""
    pairs = inputs.pairs
    return () if pairs is None or pairs.lo is None else (pairs.lo, pairs.hi)


def _joined(piece: Any, q: Any, k: Any, v: Any, *others: Any) -> PieceInputs:
    """Put a rectangle together again, of `_of_batch` and `_ends`."""
    *ids, ends = others
    tested = Pairs(*(ends or (None, None)), *(ids or (None, None)))
    return PieceInputs(q, k, v, tested if ids or ends else None, piece)


def _is_of_keys(mask: Mask) -> bool:
    """Tell whether a mask that forbids something says which keys are real, and no more."""
    terms = sort_terms(mask)
    return not (mask.is_full or terms.positions or terms.rest)
