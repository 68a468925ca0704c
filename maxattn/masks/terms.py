"""The terms of a bound mask, sorted by what they depend on: a pair is allowed if all allow it.

Kernels of GPU libraries take `Terms`: a band, and how many keys are real. Splash and
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

QUERY_PAD, KEY_PAD = -1, -2  # segment ids that match nothing
USE_BLOCKWISE = "set attention: dot_product with use_memory_efficient_attention: true"
Offset = int | jax.Array
"""The position of the first local token: a number, or traced inside `shard_map`."""


@dataclass(frozen=True)
class Terms:
    """The terms of a mask.

    Args:
        positions: masks without arrays that depend on queries and keys.
        limits: masks without arrays that depend on keys alone.
        keys: masks with arrays that depend on keys alone.
        rest: everything else.
    """

    positions: tuple[Mask, ...]
    limits: tuple[Mask, ...]
    keys: tuple[Mask, ...]
    rest: tuple[Mask, ...]

    @property
    def band(self) -> Band | None:
        """The band of the positions, or None if they are not one band."""
        if len(self.positions) > 1:
            return None
        return self.positions[0].band() if self.positions else Band()

    @property
    def has_flags(self) -> bool:
        """Whether flags mark the real keys, which are then in any order."""
        return any(term.key_limit() is None for term in (*self.limits, *self.keys))

    def real_keys(self, kv_len: int, kv_offset: Offset) -> Bool[Array, "B S"]:
        """Mark the local keys that every limit, length and flag allows; the batch may be 1."""
        real: Any = jnp.ones((1, kv_len), bool)
        for term in (*self.limits, *self.keys):
            ok = term.allowed(np.zeros(1, np.int32), jnp.arange(kv_len), 0, kv_offset)
            real = real & ok[:, 0, 0]
        return real

    def lengths(self, batch: int, kv_len: int, kv_offset: Offset) -> Int[Array, " B"] | None:
        """Count the real local keys of each batch row; None if all are real.

        Without flags these are the first keys; with flags they are in any order.
        """
        if not self.limits and not self.keys:
            return None
        if self.has_flags:
            count = jnp.sum(self.real_keys(kv_len, kv_offset), axis=1).astype(jnp.int32)
            return count + jnp.zeros(batch, jnp.int32)
        limits = [jnp.asarray(term.key_limit()) for term in (*self.limits, *self.keys)]
        ends = [jnp.broadcast_to(limit.astype(jnp.int32), (batch,)) for limit in limits]
        return jnp.clip(reduce(jnp.minimum, ends) - kv_offset, 0, kv_len)


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
    """A mask as a function of positions, at most one pair of segment ids, and padding."""

    positions: Mask
    segments: Mask | None
    padding: tuple[Mask, ...]

    @property
    def has_ids(self) -> bool:
        """Whether segment ids are needed."""
        return self.segments is not None or bool(self.padding)


def split_mask(mask: Mask) -> SplitMask | Reason:
    """Split a bound mask, or its form, or return why `flash` refuses it."""
    terms = mask.terms()
    positions = reduce(and_, (term for term in terms if not term.has_data), Full())
    arrays = [term for term in terms if term.has_data]
    segments = [term for term in arrays if term.segment_ids() is not None]
    padding = [term for term in arrays if term.segment_ids() is None]
    for term in padding:
        if not term.is_key_padding:
            return _refused_array(term)
    if len(segments) > 1:
        rule = f"it takes one pair of segment ids, and the mask has {len(segments)} Segments"
        remedy = f"number the common segments, or {USE_BLOCKWISE}"
        return Reason("flash", "mask Segments & Segments", rule, remedy)
    if not positions.has_exact_intervals:
        what = f"mask of {positions.extent.masks} masks"
        rule = f"it tests up to {MOST_SPANS} intervals of keys a query, and the mask has more"
        return Reason("flash", what, rule, USE_BLOCKWISE)
    return SplitMask(positions, segments[0] if segments else None, tuple(padding))


def _refused_array(term: Mask) -> Reason:
    what = " and ".join(term.names(with_arrays=True))
    if not term.parts():
        rule = "it tests masks of positions, lengths and segments inside the kernel, and takes no"
        rule += " table of pairs"
        remedy = f"write the mask as one of maxattn.masks, or {USE_BLOCKWISE}"
        return Reason("flash", f"mask {what}", rule, remedy)
    rule = f"it takes arrays joined by & alone, and {term} has {what} under | or ~"
    return Reason("flash", f"mask {what} under | or ~", rule, USE_BLOCKWISE)


def segment_ids(
    parts: SplitMask, batch: int, q_len: int, kv_len: int, kv_offset: Offset
) -> tuple[Int[Array, "B T"], Int[Array, "B S"]] | None:
    """Write lengths, flags and segments as segment ids, or None if there are none.

    Ids are equal exactly for the pairs that the arrays allow: negative ids become `QUERY_PAD` and
    `KEY_PAD`, which match nothing.
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
    """Return whether a query's keys have a lower and an upper end, if they are one interval.

    None for other masks of positions, and if two ends do not fit one word.
    """
    spans = mask.spans(np.zeros(1, np.int32), np, True)
    if len(spans) != 1:
        return None
    lower, upper = (end is not None for end in spans[0])
    width = min(kv_len, mask.most_keys() or kv_len)
    fits = kv_len.bit_length() + width.bit_length() <= WORD
    return (lower, upper) if fits or not (lower and upper) else None


def sort_note(what: str) -> str:
    """Advise an order of segment ids in which most chunks or tiles are skipped."""
    return (
        f"{what} are skipped where the ranges of their ids do not meet: tokens in the order of"
        " their ids (jnp.argsort(ids, axis=1)) skip most; lengths known when tracing go into"
        " masks.Segments.of_lengths, which every kernel skips by"
    )


# ---- equal blocks as batch rows ------------------------------------------------------------------


class OwnBlocks(NamedTuple):
    """Equal blocks of a sequence, each of which attends to itself alone.

    Args:
        count: how many there are, two or more.
        q_len, kv_len: tokens of each.
        mask: the mask inside each.
    """

    count: int
    q_len: int
    kv_len: int
    mask: Mask


@lru_cache(maxsize=1024)
def own_blocks(mask: Mask, q_len: int, kv_len: int) -> OwnBlocks | None:
    """Return the shortest blocks that see only themselves, or None.

    Each is an example of its own: a kernel computes them as batch rows. `mask` is bound, and a
    `form()` if it has arrays.

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
            within = own_blocks(rest, q, kv)  # each block may divide again
            if within is None:
                return OwnBlocks(count, q, kv, rest)
            return within._replace(count=count * within.count)
    return None
