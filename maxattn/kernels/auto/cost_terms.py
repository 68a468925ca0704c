"""What governs how long a kernel takes on a GPU, as terms of a sum: predict.py weighs them.

Every term is a time in ms at the figures of the chip's maker, so that a weight says how far from
them a kernel stays:

    launch      1
    waves       products of tiles, where thread blocks run in waves, the last as long as any
    tiles       products of tiles, evenly over the streaming multiprocessors (SMs)
    longest     products of the thread block with most tiles, which others may wait for
    exps        exponentials of the tiles' scores, evenly over the SMs
    starts      what a thread block does beside its tiles, a wave each
    resumes     the same of persistent thread blocks, which load a row while they end the last
    mask_starts the same with a mask: a list of tiles to read, a first tile to wait for
    bytes       what is read and written once
    sums        float32 gradients that are summed in memory
    tested      pairs of tiles that a mask cuts, or that are tested by ids
    masked      1 with a mask, for what is prepared of it
    lists       1 with ids, of which lists of tiles are made on the device
    shared      bytes of keys and values, were each query head to have its own
    lengths, length_bytes     what lengths of keys cost beside that

Of plain JAX the scores in memory take the place of the waves.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from maxattn.call import Call
from maxattn.devices import DEVICES, SMS, Device
from maxattn.kernels import mask_split
from maxattn.kernels.blockwise.chunk_sizes import choose_chunks
from maxattn.kernels.fa4 import (
    band_lists,
    block_sparse,
    split_keys,
    split_keys_lists,
    split_lists,
    split_queries,
)
from maxattn.kernels.fa4.block_sparse_lists import tally, visits_by_keys, visits_by_queries
from maxattn.kernels.fa4.launch_lines import shapes_of
from maxattn.kernels.fa4.mask_inputs import tile_of
from maxattn.kernels.fa4.tile_sizes import Tile, backward_tile, whole_tile
from maxattn.masks import Full, Mask

FORWARD, BACKWARD = "forward", "backward"
PLAIN = ("memory_efficient", "dot_product")
FEW_SCORES = 6e7  # up to which plain JAX can be fastest, and was measured
# Tokens up to which times are predicted: twice as many as were measured. To count the tiles of
# longer masks takes seconds.
MOST_TOKENS = 2**18
OTHERS = Tile(128, 128)  # of the libraries that do not say
NAMED = DEVICES["NVIDIA H200"]
EXPONENTIALS = 16 * 1.755e6  # an SM and ms: of the special function units, at the boost clock
START, LAUNCH = 1e-3, 1e-3  # ms
# Of the pairs: a plan knows that there are lengths or ids, and not which.
KNOWN_LENGTHS, KNOWN_IDS = 0.6, 0.25

Terms = dict[str, float]


class TileWork(NamedTuple):
    """Count what a pass goes through.

    Attributes:
        blocks: thread blocks, of all heads.
        steps: tiles that all of them visit.
        longest: tiles that one of them visits, at most.
        tested: those of the steps whose pairs are tested.
    """

    blocks: float
    steps: float
    longest: float
    tested: float = 0.0


def terms(kernel: str, what: str, call: Call, device: Device) -> Terms:
    """Return the terms of a kernel's pass.

    Args:
        kernel: its name.
        what: `FORWARD` or `BACKWARD`.
        call: that the kernel takes.
        device: an NVIDIA GPU.
    """
    if kernel in PLAIN:
        return _of_plain(kernel, call, device)
    made = _forward if what == FORWARD else _backward
    found = made(kernel, call, device)
    starts = found["starts"] + found.get("resumes", 0.0)
    masked = {"mask_starts": starts * (not call.mask.is_full)}
    return found | masked | _memory(what, call, device)


# ---- kernels of tiles ----------------------------------------------------------------------------


def _forward(kernel: str, call: Call, device: Device) -> Terms:
    tile = OTHERS
    if kernel == "flash":
        tile = tile_of(positions_of(call.mask), call.head_dim, (call.q_len, call.kv_len))
    work = _work(kernel, call, tile)
    found = _of_tiles(work, tile, 4, _width(kernel, call), device)
    if kernel != "flash":
        return found
    found |= _split_forward(found, call, device)
    return _resumed(found) if _is_persistent(call, tile) else found


def _is_persistent(call: Call, tile: Tile) -> bool:
    queries, keys = shapes_of(call)
    if call.mask.is_full or _has_lengths_alone(call):
        return block_sparse.order(queries, keys, None, tile, forward=True).persistent
    return band_lists.runs_persistent(call, queries)


def _resumed(found: Terms) -> Terms:
    """Return the terms of persistent thread blocks, which start once and go on from row to row."""
    return found | {"starts": 0.0, "resumes": found["starts"]}


def _split_forward(found: Terms, call: Call, device: Device) -> Terms:
    """Return what a forward takes less of where the last tiles are split over the keys."""
    sms, sizes = device.sms or SMS, shapes_of(call)
    if not (call.mask.is_full or _has_lengths_alone(call)):
        share = split_keys_lists.splits_for_call(call, *sizes, sms).share
        return {name: share * found[name] for name in ("waves", "longest", "starts")}
    tail = split_keys.split_for(*sizes, sms)
    if tail is None:
        return {}
    of_tiles = split_keys.work_of(*sizes, sms)
    share = of_tiles.cost(tail) / of_tiles.unsplit
    return {name: share * found[name] for name in ("waves", "longest", "starts")}


def _backward(kernel: str, call: Call, device: Device) -> Terms:
    width = _width(kernel, call)
    if kernel == "flash":
        return _flash_backward(call, width, device)
    work = _work(kernel, call, OTHERS, backward=True)
    if kernel != "tokamax_flash":
        return _of_tiles(work, OTHERS, 10, width, device)
    # Two kernels: dQ by tiles of queries, dK and dV by tiles of keys.
    of_queries = work._replace(blocks=_blocks(call, call.q_len, OTHERS.queries))
    first = _of_tiles(of_queries, OTHERS, 6, width, device)
    return {
        name: ms + first[name] for name, ms in _of_tiles(work, OTHERS, 8, width, device).items()
    }


def _flash_backward(call: Call, width: int, device: Device) -> Terms:
    if not call.mask.is_full:
        tile = backward_tile(call.head_dim)
        work = _work("flash", call, tile, backward=True)
        found = _of_tiles(work, tile, 10, width, device)
        return found | _split_lists(found, call, device)
    tile = whole_tile(call.head_dim)
    work = _work("flash", call, tile, backward=True)
    found, sms = _of_tiles(work, tile, 10, width, device), device.sms or SMS
    tail = split_queries.tail_for(*shapes_of(call), sms)
    if tail is None:
        return found
    of_tiles = split_queries.BackwardWork(
        -(-call.kv_len // tile.keys), call.batch * call.heads, -(-call.q_len // tile.queries), sms
    )
    share = of_tiles.cost(tail) / of_tiles.lasts(of_tiles.tiles)
    return found | {name: share * found[name] for name in ("waves", "longest", "starts")}


def _split_lists(found: Terms, call: Call, device: Device) -> Terms:
    """Return what a masked backward takes less of in splits of the queries."""
    sms, sizes = device.sms or SMS, shapes_of(call)
    # The weights of calls with lengths were fitted with their splits.
    splits = 1 if _has_lengths_alone(call) else split_lists.splits_for_call(call, *sizes, sms)
    if splits == 1:
        return {}
    works = split_lists.works_for(call, *sizes)
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
        "waves": waves * work.steps / work.blocks * each,
        "tiles": work.steps / sms * each,
        "longest": work.longest * each,
        "exps": work.steps * exps,
        "starts": waves * START,
        "tested": work.tested * exps,
    }


def _work(kernel: str, call: Call, tile: Tile, backward: bool = False) -> TileWork:
    """Count the tiles that a kernel visits: thread blocks take queries, of a backward keys."""
    positions = positions_of(call.mask)
    by_ids = kernel == "flash" and has_ids(call)
    tests_all = by_ids
    if kernel == "tokamax_flash" and backward and not _is_causal(positions):
        positions, tests_all = Full(), not positions.is_full
    lengths = call.q_len, call.kv_len
    full, mixed, _ = tally(positions, tile, lengths)
    share = KNOWN_LENGTHS if _has_lengths_alone(call) else KNOWN_IDS if by_ids else 1.0
    tested = full + mixed if tests_all else mixed * (not positions.is_full)
    heads, side = call.batch * call.heads, int(backward)
    steps = max(1.0, share * heads * (full + mixed))
    most = _longest(positions, tile, lengths, backward)
    return TileWork(_blocks(call, lengths[side], tile[side]), steps, most, heads * tested)


def _longest(mask: Mask, tile: Tile, lengths: tuple[int, int], backward: bool) -> int:
    """Return the most tiles that a row of tiles visits; of a backward, a column."""
    visits = visits_by_keys if backward else visits_by_queries
    return int(visits(mask, tile, lengths).max(initial=0))


def _blocks(call: Call, length: int, size: int) -> float:
    return call.batch * call.heads * -(-length // size)


# ---- masks ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def positions_of(mask: Mask) -> Mask:
    """Return what a mask says of positions alone; everything where it is no such mask."""
    split = mask_split.split(mask)
    return split.positions if isinstance(split, mask_split.SplitMask) else Full()


def _is_causal(positions: Mask) -> bool:
    band = positions.band()
    return band is not None and band.left is None


def has_ids(call: Call) -> bool:
    """Tell whether a mask has arrays that are not of keys alone: what it allows is not known."""
    return call.mask.has_data and not _has_lengths_alone(call)


def _has_lengths_alone(call: Call) -> bool:
    terms = call.mask.terms()
    return call.mask.has_data and all(term.is_of_keys or not term.has_data for term in terms)


# ---- memory, plain JAX ---------------------------------------------------------------------------


def _memory(what: str, call: Call, device: Device) -> Terms:
    queries, keys = _sizes(call)
    passes = 1 if what == FORWARD else 2  # a backward reads two more of each, and writes one more
    moved = passes * 2 * (2 * queries + 2 * keys) / _bandwidth(device)
    shared = call.batch * call.kv_len * call.heads * call.head_dim * (call.heads != call.kv_heads)
    sums = 0 if what == FORWARD else 4 * (2 * queries + 2 * shared) / _bandwidth(device)
    lengths = float(_has_lengths_alone(call))
    return {
        "bytes": moved,
        "sums": sums,
        "masked": LAUNCH * (not call.mask.is_full),
        "lists": LAUNCH * has_ids(call),
        "shared": 4 * shared / _bandwidth(device),
        "lengths": lengths * LAUNCH,
        "length_bytes": lengths * moved,
    }


def _of_plain(kernel: str, call: Call, device: Device) -> Terms:
    scores = call.batch * call.heads * call.q_len * call.kv_len
    queries, keys = _sizes(call)
    found = {
        "launch": LAUNCH,
        "scores": 4 * scores / _bandwidth(device),
        "tiles": 2 * scores * (call.head_dim + call.value_dim) / _peak(device),
        "bytes": 2 * (2 * queries + 2 * keys) / _bandwidth(device),
        "masks": 4 * scores / _bandwidth(device) * (not call.mask.is_full),
    }
    if kernel == "dot_product":
        return found
    q, kv = choose_chunks(call, None, None)
    return found | {"starts": START * -(-call.q_len // q) * -(-call.kv_len // kv)}


def _sizes(call: Call) -> tuple[float, float]:
    """Return the numbers of entries of Q and of K, or the mean of Q and out, and of K and V."""
    dim = (call.head_dim + call.value_dim) / 2
    queries = call.batch * call.q_len * call.heads * dim
    return queries, call.batch * call.kv_len * call.kv_heads * dim


def _width(kernel: str, call: Call) -> int:
    """Return the head dim as a kernel pads it, as far as that is known."""
    step = 16 if kernel == "flash" else 64
    return -(-call.head_dim // step) * step


def _peak(device: Device) -> float:
    """Return operations a ms."""
    return (device.peak or NAMED.peak or 1.0) / 1e3


def _bandwidth(device: Device) -> float:
    """Return bytes a ms."""
    machine = device.machine or NAMED.machine
    assert machine is not None
    return machine.hbm / 1e3
