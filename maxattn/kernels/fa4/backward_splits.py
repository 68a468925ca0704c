"""Which backwards of FlashAttention-4 are split over the queries, so that fewer SMs wait."""

from __future__ import annotations

from maxattn.call import Call
from maxattn.kernels.fa4 import (
    first_writes,
    fold_groups,
    key_lengths,
    one_key_tile,
    split_lists,
)
from maxattn.kernels.fa4.tile_sizes import shapes_of
from maxattn.masks.terms import sort_terms


def is_split(call: Call, sms: int) -> bool:
    """Tell whether the backward of a call is split, where maxattn launches the kernels.

    Args:
        call: of one device.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    taken = fold_groups.call_of(call)
    shapes, terms = shapes_of(taken), sort_terms(call.mask)
    if one_key_tile.takes_call(taken):
        return one_key_tile.splits_for(shapes[0], sms) > 1
    if call.mask.is_full:
        return first_writes.tail_for(*shapes, sms) is not None
    if not (terms.positions or terms.rest):
        return key_lengths.splits_for(*shapes, sms) > 1
    return split_lists.splits_for_call(call, *shapes, sms) > 1
