"""What `explain` prints of FlashAttention-4's launches for a local call."""

from __future__ import annotations

from collections.abc import Callable

from maxattn.call import Call
from maxattn.kernels.fa4 import (
    band,
    band_lists,
    first_writes,
    fold_groups,
    key_lengths,
    mask_inputs,
    one_key_tile,
    row_orders,
    split_keys_lists,
    split_lists,
)
from maxattn.kernels.fa4.block_sparse_lists import tally
from maxattn.kernels.fa4.forward_tiles import ids_persist, tile_over_all
from maxattn.kernels.fa4.launch_order import Order
from maxattn.kernels.fa4.split_keys import KeySplits
from maxattn.kernels.fa4.tile_sizes import (
    Dims,
    Tile,
    backward_tile,
    narrow_tile,
    shapes_of,
    whole_tile,
)

OWN, PERSISTENT = "the library's own", ", persistent thread blocks"
DYNAMIC = f"{PERSISTENT} that take the next row as soon as they are free"


def lists_line(call: Call) -> str:
    """Say how many tiles the forward goes through, or from what the device lists them."""
    lengths, mask = (call.q_len, call.kv_len), mask_inputs.positions(call.mask)
    rows = mask_inputs.own_rows(call)
    tile = mask_inputs.tile_of(mask, shapes_of(call)[0], call.kv_len, call.sharded, rows > 0)
    what = f"block-sparse lists of {_tiles(tile)}"
    if rows:
        each = "for each batch row" if rows > 1 else "for all batch rows"
        found = f"{what}, made on the device from the mask's arrays {each}"
        return found + DYNAMIC * ids_persist(shapes_of(call)[0], tile)
    if call.sharded:
        return f"{what}, made on the device from its positions"
    count = tally(mask, tile, lengths)
    found = f"{count.full} full, {count.mixed} mixed"
    return f"{what}: {found}, skipped {count.skipped} of {sum(count)}"


def lengths_lines(call: Call, sms: int, tail: KeySplits | None) -> tuple[str, str]:
    """Say how a forward and a backward that end at each batch row's length are launched.

    Args:
        call: of one device.
        sms: streaming multiprocessors (SMs) of the GPU.
        tail: the queries whose keys the forward splits.
    """
    taken = fold_groups.call_of(call)
    if one_key_tile.takes_call(taken):
        backward = _one_key_tile_line(taken, sms)
    else:
        backward = _backward_lists(taken, key_lengths.splits_for(*shapes_of(taken), sms))
    backward += fold_groups.line(call)
    end = ", up to the length of each batch row"
    if tail is not None:
        return f"{tile_line(call)}; {tail.line}{end}", backward
    return f"{whole_line(call)}{end}", backward


def whole_line(call: Call) -> str:
    """Say how the forward over all pairs is launched."""
    tile = tile_over_all(*shapes_of(call))
    persistent = row_orders.of(*shapes_of(call), None, tile, forward=True).persistent
    return tile_line(call) + PERSISTENT * persistent


def tile_line(call: Call) -> str:
    """Say how large the tiles of the forward over all pairs are."""
    tile = tile_over_all(*shapes_of(call))
    return _tiles(tile)


def lists_lines(call: Call, sms: int) -> tuple[str, str]:
    """Say how both passes over block-sparse lists are launched; "" for a backward like that."""
    if mask_inputs.own_rows(call):
        splits = split_lists.splits_for_call(call, *shapes_of(call), sms)
        return lists_line(call), _backward_lists(call, splits)
    forward, backward = split_lists_lines(call, sms)
    return forward or lists_line(call), backward


def split_lists_lines(call: Call, sms: int) -> tuple[str, str]:
    """Say into how many splits the lists of both passes go; "" where they go into none.

    Args:
        call: of one device, masked by more than which keys are real.
        sms: streaming multiprocessors (SMs) of the GPU; 0 where the library launches all.
    """
    if not sms:
        return "", ""
    queries, keys = shapes_of(call)
    splits = split_keys_lists.splits_for_call(call, queries, keys, sms).splits
    backward = split_lists.splits_for_call(call, queries, keys, sms)
    blocks = _splits(splits, "keys") or _blocks(band_lists.forward_order(call, queries))
    forward = f"{lists_line(call)}{blocks}"
    forward = forward if band_lists.lists_forward(call, queries, keys, sms) else ""
    listed = band_lists.lists_backward(call, queries, keys, sms)
    return forward, _backward_lists(call, backward) if listed else ""


def _backward_lists(call: Call, splits: int) -> str:
    tile = backward_tile(call.head_dim, call.q_len)
    return f"block-sparse lists of {_tiles(tile)}{_splits(splits, 'queries')}"


def _one_key_tile_line(call: Call, sms: int) -> str:
    queries, _ = shapes_of(call)
    tile, splits = one_key_tile.tile_for(queries), one_key_tile.splits_for(queries, sms)
    what = f"{_tiles(tile)}; the keys are one tile, and dQ is written once"
    return what + _splits(splits, "queries")


def _blocks(order: Order) -> str:
    return DYNAMIC if order.dynamic else PERSISTENT * order.persistent


def _tiles(tile: Tile) -> str:
    return f"{tile.queries}x{tile.keys} tiles"


def _splits(splits: int, over: str) -> str:
    return f", in {splits} splits of the {over}, so that fewer SMs wait" if splits > 1 else ""


def band_blocks_line(call: Call, split_for: Callable[[Dims, Dims], KeySplits | None]) -> str:
    """Say how the forward of a band is launched that does not go by lists.

    Args:
        call: of one device.
        split_for: chooses what of a rectangle without a band is split over its keys.
    """
    whole = fold_groups.seen_by_all(call)
    tail = None if whole is None else split_for(*shapes_of(whole))
    if whole is None or tail is None:
        return OWN
    return f"{OWN}; of the {whole.kv_len:,} keys that all queries see, {tail.line}"


def band_backward_line(call: Call, sms: int) -> str:
    """Say how the backward of a band is launched that does not go by lists."""
    whole = fold_groups.seen_by_all(call)
    line = OWN if whole is None else split_line(whole, sms)
    if whole is None or line == OWN:
        return OWN
    return f"{OWN}; of the {whole.kv_len:,} keys that all queries see, {line}"


def split_line(call: Call, sms: int) -> str:
    """Say how the backward over all pairs is launched."""
    taken, folds = fold_groups.call_of(call), fold_groups.line(call)
    if one_key_tile.takes_call(taken):
        return _one_key_tile_line(taken, sms) + folds
    tail, what = first_writes.tail_for(*shapes_of(taken), sms), OWN
    tile = whole_tile(taken.head_dim, taken.q_len)
    if first_writes.takes_call(taken):
        what = f"{_tiles(tile)}; the first tile of keys writes dQ, others add to it"
    elif narrow_tile(taken.head_dim, taken.q_len) is not None:
        what = _tiles(tile)
    return what + folds + ("" if tail is None else f"; {tail.line}")


def band_line(call: Call) -> str:
    """Say what is computed of a mask without block-sparse lists, and what it allows of that."""
    computed, allowed = (f"{100 * share:.3g}%" for share in band.shares(call))
    of_band = f"the narrowest band around the mask, {computed} of all pairs"
    return (
        "FlashAttention-4 skips a mask's empty tiles on Hopper GPUs alone: here it computes and"
        f" tests {'all pairs' if call.sharded else of_band}, and the mask allows {allowed}"
    )
