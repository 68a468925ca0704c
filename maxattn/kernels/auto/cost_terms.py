"""What governs how long a kernel takes on a GPU, as terms of a sum: predict.py weighs them.

Every term is a time in ms at the figures of the chip's maker, so that a weight says how far from
them a kernel stays:

    launch      1, or 2 where a mask is cut in two
    waves       products of tiles until the last thread block ends, where they run in waves
    tiles       products of tiles, evenly over the streaming multiprocessors (SMs)
    longest     products of the thread block with most tiles, which others may wait for
    exps        exponentials of the tiles' scores, evenly over the SMs
    starts      what a thread block does beside its tiles, a wave each
    resumes     the same of persistent thread blocks, which load a row while they end the last
    mask_starts the same with a mask: a list of tiles to read, a first tile to wait for
    bytes       what the main launch reads and writes
    roof        the longer of that and of the tiles' products
    passes      what the launches before and after it read and write
    copies      what XLA copies beside the kernel (copies.py), whose weight is 1
    tested      pairs of tiles that a mask or ids cut
    looked_up   those of them whose test reads arrays
    odd_heads   the waves of heads that FlashAttention-4 copies in uneven parts
    odd_starts  the starts of the same
    masked      1 with a mask, for what is prepared of it
    lists       1 with ids, of which lists of tiles are made on the device
    shared      float32 gradients of keys that several query heads add to
    grouped     1 where query heads share keys, for what is prepared of those sums
    lengths     1 with lengths of keys

Of plain JAX the scores in memory take the place of the waves, and rows of scores that no vector of
8 divides count once more.
"""

from __future__ import annotations

from dataclasses import replace

from maxattn.call import Call
from maxattn.devices import SMS, Device
from maxattn.kernels.auto import tile_work
from maxattn.kernels.auto.copies import calls_of, entries
from maxattn.kernels.auto.memory_terms import (
    BACKWARD,
    COPIES,
    FORWARD,
    LAUNCH,
    NAMED,
    Terms,
    bandwidth,
    copies_time,
    copy_time,
    memory_terms,
)
from maxattn.kernels.auto.tile_work import (
    OTHERS,
    UNKNOWN,
    Known,
    Seen,
    TileWork,
    has_ids,
    has_lengths_alone,
    positions_of,
    seen_by,
)
from maxattn.kernels.blockwise.chunk_sizes import choose_chunks
from maxattn.kernels.fa4 import (
    band_lists,
    first_writes,
    fold_groups,
    key_lengths,
    one_key_tile,
    row_orders,
    split_keys,
    split_keys_lists,
    split_lists,
    split_queries,
)
from maxattn.kernels.fa4.forward_tiles import ids_persist, tile_over_all
from maxattn.kernels.fa4.mask_inputs import tile_of
from maxattn.kernels.fa4.tile_sizes import (
    Tile,
    backward_tile,
    shapes_of,
    sums_width,
    whole_tile,
)
from maxattn.masks import Full

PLAIN = ("memory_efficient", "dot_product")
FEW_SCORES = 6e7  # up to which plain JAX can be fastest, and was measured
# Tokens up to which times are predicted: twice as many as were measured. To count the tiles of
# longer masks takes seconds.
MOST_TOKENS = 2**18
EXPONENTIALS = 16 * 1.755e6  # an SM and ms: of the special function units, at the boost clock
START = 1e-3  # ms
# Entries of a head that FlashAttention-4 copies at a time. Of other heads the last copy is not
# whole, and rows begin between the sectors of the cache.
ODD_HEADS = 16
VECTOR = 8  # entries that XLA and cuBLAS read at a time, where rows begin at multiples of them
# Sizes that kernels pad heads to, forward and backward. Of cuDNN it is not known.
FLASH_FORWARD, TOKAMAX, OTHER_WIDTHS = 16, (16, 64), (64, 64)


def terms(kernel: str, what: str, call: Call, device: Device, known: Known = UNKNOWN) -> Terms:
    """Return the terms of a kernel's pass.

    Args:
        kernel: its name.
        what: `FORWARD` or `BACKWARD`.
        call: that the kernel takes.
        device: an NVIDIA GPU.
        known: what lengths and ids leave.
    """
    if kernel in PLAIN:
        return _of_plain(kernel, call, device)
    if kernel != "flash" or what != BACKWARD:
        return _of_launch(kernel, what, call, device, known)
    return _of_flash_backward(call, device, known)


def _of_flash_backward(call: Call, device: Device, known: Known) -> Terms:
    """Return the terms of all that one backward of `flash` launches."""
    parts = fold_groups.folded_parts(call)
    if parts != (call,) and band_lists.lists_backward(call, *shapes_of(call), device.sms or SMS):
        parts = (call,)
    launched, lists = [_taken(part) for part in parts], parts == (call,)
    found = [_of_launch("flash", BACKWARD, x, device, known, lists) for x in launched]
    folded = [x for part in parts if (x := fold_groups.call_of(part)) is not part]
    turned = sum(fold_groups.COPIES * copy_time(2 * entries(x)[0], device) for x in folded)
    return _summed(found) | {COPIES: copies_time("flash", BACKWARD, call, device) + turned}


def _taken(call: Call) -> Call:
    """Return the call whose backward is launched: over one tile of keys lengths skip nothing."""
    taken = fold_groups.call_of(call)
    if not one_key_tile.takes_call(taken):
        return taken
    return replace(taken, mask=Full().bind(taken.q_len, taken.kv_len))


def _summed(found: list[Terms]) -> Terms:
    names = dict.fromkeys(name for each in found for name in each)
    return {name: sum(each.get(name, 0.0) for each in found) for name in names}


def _of_launch(
    kernel: str, what: str, call: Call, device: Device, known: Known, lists: bool = True
) -> Terms:
    """Return the terms of a pass of a call that is launched as it is, as for `terms`.

    Args:
        kernel, what, call, device, known: as for `terms`.
        lists: whether a masked backward of `flash` may go by lists.
    """
    if what == FORWARD:
        found = _forward(kernel, call, device, known)
    else:
        found = _backward(kernel, call, device, known, lists)
    starts = found["starts"] + found.get("resumes", 0.0)
    masked = {"mask_starts": starts * (not call.mask.is_full)}
    is_odd = kernel == "flash" and call.head_dim % ODD_HEADS > 0
    odd = {"odd_heads": found["waves"] * is_odd, "odd_starts": starts * is_odd}
    calls = {"launch": LAUNCH * calls_of(kernel, what, call, device.sms or SMS)}
    return found | calls | masked | odd | memory_terms(kernel, what, call, device, found["tiles"])


# ---- kernels of tiles ----------------------------------------------------------------------------


def _forward(kernel: str, call: Call, device: Device, known: Known) -> Terms:
    seen, width = seen_by(kernel, call, known), _width(kernel, FORWARD, call)
    if kernel == "flash":
        return _flash_forward(call, seen, width, device)
    tile = OTHERS
    if kernel == "tokamax_flash":
        tile = tile_work.tokamax_forward_tile(call.head_dim)
    found = _of_tiles(tile_work.by_queries(call, tile, seen), tile, 4, width, device)
    if kernel == "tokamax_flash":
        persists = not tile_work.is_causal(positions_of(call.mask))
    else:  # times of longer heads of cuDNN are told better so
        persists = call.head_dim > 128
    return _resumed(found) if persists else found


def _flash_forward(call: Call, seen: Seen, width: int, device: Device) -> Terms:
    tile = _forward_tile(call)
    found = _of_tiles(tile_work.by_queries(call, tile, seen), tile, 4, width, device)
    found |= _split_forward(found, call, device)
    return _resumed(found) if _is_persistent(call, tile, device.sms or SMS) else found


def _forward_tile(call: Call) -> Tile:
    queries, keys = shapes_of(call)
    positions, ids = positions_of(call.mask), has_ids(call)
    if positions.is_full and not ids:
        return tile_over_all(queries, keys)
    return tile_of(positions, queries, call.kv_len, has_ids=ids)


def _is_persistent(call: Call, tile: Tile, sms: int) -> bool:
    queries, keys = shapes_of(call)
    if call.mask.is_full or has_lengths_alone(call):
        return row_orders.of(queries, keys, None, tile, forward=True).persistent
    if has_ids(call):
        return ids_persist(queries, tile)
    if not band_lists.lists_forward(call, queries, keys, sms):
        return False
    splits = split_keys_lists.splits_for_call(call, queries, keys, sms).splits
    return splits == 1 and band_lists.forward_order(call, queries).persistent


def _resumed(found: Terms) -> Terms:
    """Return the terms of persistent thread blocks, which start once and go on from row to row."""
    return found | {"starts": 0.0, "resumes": found["starts"]}


def _split_forward(found: Terms, call: Call, device: Device) -> Terms:
    """Return what a forward takes less of where the last tiles are split over the keys."""
    sms, sizes = device.sms or SMS, shapes_of(call)
    if not (call.mask.is_full or has_lengths_alone(call)):
        if not band_lists.lists_forward(call, *sizes, sms):
            return {}
        share = split_keys_lists.splits_for_call(call, *sizes, sms).share
        return {name: share * found[name] for name in ("waves", "longest", "starts")}
    tail = split_keys.split_for(*sizes, sms)
    if tail is None:
        return {}
    of_tiles = split_keys.work_of(*sizes, sms)
    share = of_tiles.cost(tail) / of_tiles.unsplit
    return {name: share * found[name] for name in ("waves", "longest", "starts")}


def _backward(kernel: str, call: Call, device: Device, known: Known, lists: bool) -> Terms:
    width = _width(kernel, BACKWARD, call)
    if kernel == "tokamax_flash":
        return _tokamax_backward(call, width, device)
    seen = seen_by(kernel, call, known)
    if kernel == "flash":
        return _flash_backward(call, seen, width, device, lists)
    seen, tile = tile_work.seen_by_cudnn_backward(call, seen), tile_work.cudnn_backward_tile(call)
    return _of_tiles(tile_work.by_keys(call, tile, seen), tile, 10, width, device)


def _tokamax_backward(call: Call, width: int, device: Device) -> Terms:
    """Count two kernels: dQ by tiles of queries, dK and dV by tiles of keys of all heads."""
    seen, of_queries, of_keys = (
        tile_work.seen_by_tokamax_backward(call),
        Tile(128, 64),
        Tile(64, 128),
    )
    first = _of_tiles(tile_work.by_queries(call, of_queries, seen), of_queries, 6, width, device)
    work = tile_work.by_keys(call, of_keys, seen, shared=True)
    second = _of_tiles(work, of_keys, 8, width, device)
    return {name: ms + first[name] for name, ms in second.items()} | {"launch": LAUNCH}


def _flash_backward(call: Call, seen: Seen, width: int, device: Device, lists: bool) -> Terms:
    if not call.mask.is_full:
        tile = backward_tile(call.head_dim, call.q_len)
        found = _of_tiles(tile_work.by_keys(call, tile, seen), tile, 10, width, device)
        return found | (_split_lists(found, call, device) if lists else {})
    one = one_key_tile.takes_call(call)
    tile = (backward_tile if one else whole_tile)(call.head_dim, call.q_len)
    work = tile_work.by_keys(call, tile, seen)
    found, sms = _of_tiles(work, tile, 10, width, device), device.sms or SMS
    of_tiles = split_queries.BackwardWork(
        -(-call.kv_len // tile.keys), call.batch * call.heads, -(-call.q_len // tile.queries), sms
    )
    sizes = shapes_of(call)
    tail = split_queries.tail_of(of_tiles) if one else first_writes.tail_for(*sizes, sms)
    if tail is None:
        return found
    share = of_tiles.cost(tail) / of_tiles.lasts(of_tiles.tiles)
    return found | {name: share * found[name] for name in ("waves", "longest", "starts")}


def _split_lists(found: Terms, call: Call, device: Device) -> Terms:
    """Return what a masked backward takes less of in splits of the queries."""
    sms, sizes = device.sms or SMS, shapes_of(call)
    if has_lengths_alone(call) and positions_of(call.mask).is_full:
        splits, works = key_lengths.splits_for(*sizes, sms), key_lengths.works_for(*sizes)
    else:
        splits = split_lists.splits_for_call(call, *sizes, sms)
        works = split_lists.works_for(call, *sizes)
    if splits == 1:
        return {}
    lasts = [sum(work.lasts(n, sms) for work in works) for n in (splits, 1)]
    share = lasts[0] / lasts[1]
    return {name: share * found[name] for name in ("waves", "longest", "starts")}


def _of_tiles(work: TileWork, tile: Tile, products: int, width: int, device: Device) -> Terms:
    """Return the terms of the products of tiles.

    Args:
        work: how many.
        tile: their size.
        products: operations for each pair and each entry of a head.
        width: of a head, as the kernel pads it.
        device: where they are spread.
    """
    sms, scores = device.sms or SMS, tile.queries * tile.keys
    each = products * scores * width / _peak(device) * sms
    waves = -(-work.blocks // sms)
    exps = scores / EXPONENTIALS / sms
    return {
        "launch": LAUNCH,
        "waves": work.lasts(sms) * each,
        "tiles": work.steps / sms * each,
        "longest": work.longest * each,
        "exps": work.steps * exps,
        "starts": waves * START,
        "tested": work.tested * exps,
        "looked_up": work.tested * exps * work.looks_up,
    }


# ---- plain JAX ----


def _of_plain(kernel: str, call: Call, device: Device) -> Terms:
    scores = call.batch * call.heads * call.q_len * call.kv_len
    queries, keys = entries(call)
    found = {
        "launch": LAUNCH,
        "scores": 4 * scores / bandwidth(device),
        "tiles": 2 * scores * (call.head_dim + call.value_dim) / _peak(device),
        "bytes": 2 * (queries + keys) / bandwidth(device),
        "odd_scores": 4 * scores / bandwidth(device) * (call.kv_len % VECTOR > 0),
        "masks": 4 * scores / bandwidth(device) * (not call.mask.is_full),
    }
    if kernel == "dot_product":
        return found
    q, kv = choose_chunks(call, None, None)
    return found | {"starts": START * -(-call.q_len // q) * -(-call.kv_len // kv)}


def _width(kernel: str, what: str, call: Call) -> int:
    """Return the head dim as a kernel pads it, as far as that is known."""
    if kernel == "flash":
        rounded = -(-call.head_dim // FLASH_FORWARD) * FLASH_FORWARD
        return sums_width(call.head_dim) if what == BACKWARD else rounded
    step = (TOKAMAX if kernel == "tokamax_flash" else OTHER_WIDTHS)[what == BACKWARD]
    return -(-call.head_dim // step) * step


def _peak(device: Device) -> float:
    """Return operations a ms."""
    return (device.peak or NAMED.peak or 1.0) / 1e3
