"""The terms of a bound mask (the masks joined by `&`), sorted by what each depends on.

Kernels of GPU libraries take `Terms`: a band, and the number of real keys. Splash and
FlashAttention-4 take a `SplitMask`: positions, segment ids and padding. `own_blocks` finds equal
blocks that a kernel computes as batch rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import and_
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from maxattn.errors import Reason
from maxattn.masks.algebra import And, Full
from maxattn.masks.base import Mask
from maxattn.masks.for_kernels import Band
from maxattn.masks.spans import MOST_SPANS

QUERY_PAD, KEY_PAD = -1, -2  # segment ids that match no other id
USE_BLOCKWISE = "set attention: dot_product with use_memory_efficient_attention: true"
Offset = int | jax.Array
"""The position of a shard's first token: a number, or traced inside `shard_map`."""


@dataclass(frozen=True)
class Terms:
    """The terms of a mask in four groups, all joined by `&`."""

    positions: tuple[Mask, ...]  # terms without arrays that depend on queries and keys
    limits: tuple[Mask, ...]  # terms without arrays that depend on keys alone
    keys: tuple[Mask, ...]  # terms with arrays that depend on keys alone
    rest: tuple[Mask, ...]  # terms with arrays that depend on queries or heads

    @property
    def band(self) -> Band | None:
        """The terms in `positions` as one band, or None if they form no single band."""
        if len(self.positions) > 1:
            return None
        return self.positions[0].band() if self.positions else Band()

    @property
    def has_flags(self) -> bool:
        """Whether flags mark the real keys, so that padding may come before real keys."""
        return any(term.key_limit() is None for term in (*self.limits, *self.keys))

    def real_keys(self, kv_len: int, kv_offset: Offset) -> Bool[Array, "B S"]:
        """Return flags of the local keys that all limits, lengths and flags allow; B may be 1."""
        real: Any = jnp.ones((1, kv_len), bool)
        for term in (*self.limits, *self.keys):
            ok = term.allowed(np.zeros(1, np.int32), jnp.arange(kv_len), 0, kv_offset)
            real = real & ok[:, 0, 0]
        return real

    def real_keys_first(self, batch: int, kv_len: int, kv_offset: Offset) -> Int[Array, "B S"]:
        """Return an order of the local keys of each batch row that puts real keys first."""
        order = jnp.argsort(~self.real_keys(kv_len, kv_offset), axis=1, stable=True)
        return jnp.broadcast_to(order, (batch, kv_len))

    def lengths(self, batch: int, kv_len: int, kv_offset: Offset) -> Int[Array, " B"] | None:
        """Count the real local keys of each batch row; None if every key is real.

        Without flags the real keys come first; with flags they are in any order.
        """
        if not self.limits and not self.keys:
            return None
        if self.has_flags:
            count = jnp.sum(self.real_keys(kv_len, kv_offset), axis=1).astype(jnp.int32)
            return count + jnp.zeros(batch, jnp.int32)
        limits = [jnp.asarray(term.key_limit()) for term in (*self.limits, *self.keys)]
        ends = [jnp.broadcast_to(limit.astype(jnp.int32), (batch,)) for limit in limits]
        # A traced length below 0 counts as 0; less the offset, it could wrap around.
        return jnp.clip(jnp.maximum(reduce(jnp.minimum, ends), 0) - kv_offset, 0, kv_len)


def sort_terms(mask: Mask) -> Terms:
    """Sort the terms of a bound mask, or of its form."""
    positions, limits, keys, rest = [], [], [], []
    for term in mask.terms():
        if term.is_full:
            continue
        if term.is_of_keys:
            (keys if term.has_data else limits).append(term)
        else:
            (rest if term.has_data else positions).append(term)
    return Terms(tuple(positions), tuple(limits), tuple(keys), tuple(rest))


@dataclass(frozen=True)
class SplitMask:
    """A mask split into a function of positions, at most one pair of segment ids, and padding."""

    positions: Mask
    segments: Mask | None
    padding: tuple[Mask, ...]

    @property
    def has_ids(self) -> bool:
        """Whether a kernel must compare segment ids."""
        return self.segments is not None or bool(self.padding)


def supported_split(mask: Mask) -> SplitMask:
    """Return the split of a mask that `supports` did not refuse."""
    split = split_mask(mask)
    assert isinstance(split, SplitMask), split
    return split


def split_mask(mask: Mask) -> SplitMask | Reason:
    """Split a bound mask, or its form; return a `Reason` if `flash` refuses the mask."""
    terms = mask.terms()
    positions = reduce(and_, (term for term in terms if not term.has_data), Full())
    arrays = [term for term in terms if term.has_data]
    segments = [term for term in arrays if term.segment_ids() is not None]
    padding = [term for term in arrays if term.segment_ids() is None]
    for term in padding:
        if not term.is_key_padding:
            return _refused_array(term)
    if len(segments) > 1:
        rule = f"it takes one Segments mask, and {len(segments)} are joined by &"
        remedy = f"give one Segments with an id per pair of ids, or {USE_BLOCKWISE}"
        return Reason("flash", "mask Segments & Segments", rule, remedy)
    if not positions.has_exact_intervals:
        what = f"mask of {positions.extent.masks} masks"
        most = len(positions.spans(np.zeros(1, np.int32), np, True))
        rule = f"it tests up to {MOST_SPANS} intervals of keys per query, and the mask has {most}"
        return Reason("flash", what, rule, USE_BLOCKWISE)
    return SplitMask(positions, segments[0] if segments else None, tuple(padding))


def _refused_array(term: Mask) -> Reason:
    what = " and ".join(term.names(with_arrays=True))
    if not term.parts():
        rule = "its kernel computes masks of positions, lengths and segments, and reads no table"
        rule += " of pairs"
        remedy = f"write the mask as one of maxattn.masks, or {USE_BLOCKWISE}"
        return Reason("flash", f"mask {what}", rule, remedy)
    rule = f"it takes masks with arrays only under &, and {term} has {what} under | or ~"
    return Reason("flash", f"mask {what} under | or ~", rule, USE_BLOCKWISE)


def segment_ids(
    parts: SplitMask, batch: int, q_len: int, kv_len: int, kv_offset: Offset
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | None:
    """Return lengths, flags and segments as one pair of segment ids; None without arrays.

    A query's id equals a key's id exactly if the arrays allow the pair: negative ids become
    `QUERY_PAD` and `KEY_PAD`, which match no id.
    """
    if not parts.has_ids:
        return None
    q_ids, kv_ids = jnp.zeros((1, q_len), jnp.int32), jnp.zeros((1, kv_len), jnp.int32)
    if parts.segments is not None:
        given = parts.segments.segment_ids()
        assert given is not None
        q_ids, kv_ids = (jnp.asarray(x).astype(jnp.int32) for x in given)
        q_ids = jnp.where(q_ids < 0, QUERY_PAD, q_ids)
        kv_ids = jnp.where(kv_ids < 0, KEY_PAD, kv_ids)
    for term in parts.padding:
        real = term.allowed(np.zeros(1, np.int32), jnp.arange(kv_len), 0, kv_offset)[:, 0, 0]
        kv_ids = jnp.where(real, kv_ids, KEY_PAD)
    return jnp.broadcast_to(q_ids, (batch, q_len)), jnp.broadcast_to(kv_ids, (batch, kv_len))


WORD = 32  # bits


def packed_interval(mask: Mask, kv_len: int) -> tuple[bool, bool] | None:
    """Return which ends (lower, upper) of one interval fit a word of 32 bits; None for others."""
    spans = mask.spans(np.zeros(1, np.int32), np, True)
    if len(spans) != 1:
        return None
    lower, upper = (end is not None for end in spans[0])
    width = min(kv_len, mask.most_keys() or kv_len)
    fits = kv_len.bit_length() + width.bit_length() <= WORD
    return (lower, upper) if fits or not (lower and upper) else None


def sort_note(what: str) -> str:
    """Return a plan's note on the order of segment ids in which kernels skip most tiles."""
    return (
        f"{what} are skipped if the ranges of their ids do not overlap: sort the tokens by id"
        " (jnp.argsort(ids, axis=1)) to skip most; if the lengths are known when tracing, pass"
        " masks.Segments.of_lengths, with which every kernel skips tiles"
    )


# ---- equal blocks as batch rows ------------------------------------------------------------------


class OwnBlocks(NamedTuple):
    """Equal blocks of a sequence, each of which attends to itself alone."""

    count: int  # number of blocks, two or more
    # q_len, kv_len: numbers of queries and keys in a block
    q_len: int
    kv_len: int
    mask: Mask  # the mask inside each block


@lru_cache(maxsize=1024)
def own_blocks(mask: Mask, q_len: int, kv_len: int) -> OwnBlocks | None:
    """Return the shortest equal blocks of a mask that each see only themselves, or None.

    A kernel can compute each block as a batch row. The mask is bound; a mask with arrays is given
    as its `form()`.

    >>> from maxattn import masks
    >>> own_blocks(masks.BlockSlidingWindow(4, 1, 0) & masks.Causal(0), 12, 12)
    OwnBlocks(count=3, q_len=4, kv_len=4, mask=Causal(offset=0))
    """
    terms = mask.terms()
    for term in terms:
        q, kv = term.own_block() or (0, 0)
        count = q_len // q if q else 0
        others = [each for each in terms if each is not term]
        if count < 2 or (q_len, kv_len) != (count * q, count * kv):
            continue
        if all(other.repeats(q, kv) for other in others):
            rest = And(tuple(others)).canonical() if others else Full()
            within = own_blocks(rest, q, kv)  # each block may consist of smaller blocks
            if within is None:
                return OwnBlocks(count, q, kv, rest)
            return within._replace(count=count * within.count)
    return None
