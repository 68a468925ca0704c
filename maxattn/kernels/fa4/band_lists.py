"""Which bands go by block-sparse lists, though the library's kernels know bands.

Lists pay where they are split, so that no SM waits; in forwards of short rows of tiles, whose
thread blocks are then persistent: the library starts a thread block for every row; in forwards of
long rows, whose full tiles are not tested, and light ones go last; so in those of uneven short rows
of heads that are too long to persist; in forwards of a single wave, where smaller tiles than the
library's end sooner; in backwards of so few queries that the library's tile would be half empty;
and where the library would be given copies: where queries at one end see nothing, and where some
keys are seen by all queries, others causally, as beside a cache, which are two calls whose results
are merged.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import numpy as np

from maxattn.call import Call
from maxattn.devices import SMS
from maxattn.kernels.base import Inputs, refuse_mask
from maxattn.kernels.fa4 import (
    fold_groups,
    mask_inputs,
    row_orders,
    split_keys,
    split_keys_lists,
    split_lists,
    windows,
)
from maxattn.kernels.fa4.block_sparse_lists import visits_by_queries
from maxattn.kernels.fa4.block_sparse_rows import FORWARD_CLASSES, in_classes
from maxattn.kernels.fa4.forward_tiles import LISTED_HEADS, library_tile, row_time
from maxattn.kernels.fa4.launch_order import Order
from maxattn.kernels.fa4.split_queries import Dims
from maxattn.kernels.fa4.tile_sizes import SHORT_ROW, Tile, is_short_backward, shapes_of
from maxattn.masks.terms import SplitMask, sort_terms, split_mask

FOLDED = 128  # queries, up to which it pays to fold heads beside a cache
MOST_PAIRS = 2**34  # of more a list takes megabytes, and copies are little beside the products
# Pairs and entries of a head, up to which a forward of long rows goes by lists.
MOST_LONG, LONG_HEADS = 2**32, 128
# Of heads too long to persist: the most keys of a mean row; its share of the longest one, at most.
SHORT_WIDE, UNEVEN = 1024, 0.75
SOONER = 0.9  # of the library's time, which is only predicted
MANY = 1024  # queries, from which on merging two results beside a cache is little


def forward_pays(inputs: Inputs, sms: int) -> bool:
    """Tell whether the forward of a band goes by lists; False for any other mask."""
    call = _call_of(inputs)
    return call is not None and lists_forward(call, inputs.q.shape, inputs.k.shape, sms)


def backward_pays(inputs: Inputs, sms: int) -> bool:
    """Tell whether the backward of a band goes by lists; False for any other mask."""
    call = _call_of(inputs)
    return call is not None and lists_backward(call, inputs.q.shape, inputs.k.shape, sms)


def is_band(call: Call) -> bool:
    """Tell whether the library could take a mask of positions as a band."""
    return refuse_mask("flash", sort_terms(call.mask)) is None


def lists_forward(call: Call, queries: Dims, keys: Dims, sms: int) -> bool:
    """Tell whether the forward of a mask of positions goes by lists; as `lists_backward`."""
    if not is_band(call) or gains_by_lists(call, queries):
        return True
    if needs_copies(call):
        return not _splits_last(call, sms)
    return split_keys_lists.splits_for_call(call, queries, keys, sms).splits > 1


def _splits_last(call: Call, sms: int) -> bool:
    """Tell whether many queries beside a cache have last tiles that are split over its keys.

    Lists are split all or none. The keys of one batch row are taken where they are.
    """
    whole = fold_groups.seen_by_all(call)
    if whole is None or call.batch > 1 or call.q_len < MANY:
        return False
    return split_keys.split_for(*shapes_of(whole), sms) is not None


def lists_backward(call: Call, queries: Dims, keys: Dims, sms: int) -> bool:
    """Tell whether the backward of a band goes by lists: in splits, or for its queries.

    Args:
        call: masked by positions.
        queries, keys: shapes [B,T,N,H] of q and [B,S,K,H] of k.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    if is_short_backward(queries[3], queries[1]):
        return True
    if needs_copies(call):
        return not folds_heads(call)
    return split_lists.splits_for_call(call, queries, keys, sms) > 1


@lru_cache(maxsize=1024)
def needs_copies(call: Call) -> bool:
    """Tell whether the library would be given copies: of parts of a band, or of most queries."""
    if call.q_len * call.kv_len > MOST_PAIRS:
        return False
    return len(fold_groups.pieces_of(call)) > 1 or leaves_queries(call)


def leaves_queries(call: Call) -> bool:
    """Tell whether queries at one end of a band see nothing."""
    found = fold_groups.pieces_of(call)
    if len(found) != 1:
        return False
    (p,) = found
    return windows.fitted(p, p.q1 - p.q0, p.k1 - p.k0)[0] < call.q_len


def folds_heads(call: Call) -> bool:
    """Tell whether heads that share keys are folded in a part of a band, for few queries.

    By lists they would add float32 gradients of all keys up.
    """
    return call.q_len <= FOLDED and fold_groups.folded_parts(call) != (call,)


@lru_cache(maxsize=1024)
def gains_by_lists(call: Call, queries: Dims) -> bool:
    """Tell whether the forward of a band gains by lists that are not split.

    Args:
        call: masked by positions; False for any other.
        queries: the shape [B,T,N,H] of q.
    """
    work, tile = _work(call, queries)
    if not work.size or fold_groups.hides_nothing(call):
        return False
    if len(work) * queries[0] * queries[2] <= SMS:
        return not needs_copies(call) and _ends_sooner(call, work, tile)
    row = float(work.mean()) * tile.keys
    if row > SHORT_ROW * 128:
        few = call.q_len * call.kv_len <= MOST_LONG and queries[3] <= LONG_HEADS
        return few and not needs_copies(call)
    if queries[3] > LISTED_HEADS:
        return row <= SHORT_WIDE and work.mean() < UNEVEN * work.max()
    return forward_order(call, queries).persistent


def _ends_sooner(call: Call, work: np.ndarray, tile: Tile) -> bool:
    """Tell whether the longest row of a single wave ends sooner in tiles that lists can have."""
    own = library_tile(call.head_dim)
    rows = visits_by_queries(mask_inputs.positions(call.mask), own, (call.q_len, call.kv_len))
    listed, whole = (
        row_time(call.head_dim, size, float(most.max()), persistent=False)
        for size, most in ((tile, work), (own, rows))
    )
    return listed < SOONER * whole


@lru_cache(maxsize=1024)
def forward_order(call: Call, queries: Dims) -> Order:
    """Return in which order the rows of a forward over lists start, where it is not split."""
    work, tile = _work(call, queries)
    if not work.size:
        return Order()
    keys = call.batch, call.kv_len, call.kv_heads, queries[3]
    if mask_inputs.positions(call.mask).looked_up:  # whose rows start by their length
        rows = in_classes(work, int(work.max()), FORWARD_CLASSES)
        return row_orders.of_named(work, np.asarray(rows), queries, keys, tile)
    return row_orders.of_known(work, queries, keys, tile)


@lru_cache(maxsize=1024)
def _work(call: Call, queries: Dims) -> tuple[np.ndarray, Tile]:
    """Return how many tiles each row visits, and the tile; nothing where that is not known."""
    found = split_mask(call.mask)
    if call.sharded or call.mask.has_data or not isinstance(found, SplitMask):
        return np.zeros(0, np.int32), library_tile(queries[3])
    tile = mask_inputs.tile_of(found.positions, queries, call.kv_len)
    return visits_by_queries(found.positions, tile, (call.q_len, call.kv_len)), tile


def _call_of(inputs: Inputs) -> Call | None:
    """Return the call of a band between the first query and the first key; None for others.

    Args:
        inputs: whose positions are not tested pair by pair: they are a band, if anything.
    """
    mask, starts = inputs.mask, (inputs.q_offset, inputs.kv_offset)
    is_band = bool(sort_terms(mask).positions) and not mask.has_data
    if not is_band or any(isinstance(x, jax.Array) or x for x in starts):
        return None
    return Call.of(inputs.q, inputs.k, mask)
