"""What a kernel's pass moves through a GPU's memory, in ms at the memory's own rate.

A backward of float32 sums, FlashAttention-4's and cuDNN's, is three launches: the first reads out
and dout and writes zeros, the second adds dQ to them, and the last reads the sums. tokamax writes
each gradient once, and reads out and dout before; so does FlashAttention-4 over one tile of keys.
Over some more it writes no zeros.
"""

from __future__ import annotations

from typing import NamedTuple

from maxattn.call import Call
from maxattn.devices import DEVICES, SMS, Device
from maxattn.kernels.auto.copies import copies, entries, seen_shares
from maxattn.kernels.auto.tile_work import has_ids, has_lengths_alone
from maxattn.kernels.fa4 import first_writes, one_key_tile
from maxattn.kernels.fa4.tile_sizes import (
    Tile,
    backward_tile,
    shapes_of,
    sums_width,
    whole_tile,
)

FORWARD, BACKWARD = "forward", "backward"
NAMED = DEVICES["NVIDIA H200"]
LAUNCH = 1e-3  # ms
# XLA's copies are the same beside every kernel: their term is taken as it is, and not fitted.
COPIES = "copies"
COPY = 1.2e-3  # ms, of a short one
REACHED = 1.2  # of the memory's rate: much is still in the cache
ROUND = 32  # entries of a head, that float32 sums are padded to
Terms = dict[str, float]


class Moved(NamedTuple):
    """Count bytes of a pass.

    Attributes:
        beside: of the launches before and after the main one.
        main: of the main one.
        added: of float32 gradients of keys, to which several query heads add.
    """

    beside: float
    main: float
    added: float = 0.0


def memory_terms(kernel: str, what: str, call: Call, device: Device, tiles: float) -> Terms:
    """Return the terms of memory; arguments as for `cost_terms.terms`.

    Args:
        kernel, what, call, device: whose pass it is.
        tiles: ms of the products, beside which the main launch reads and writes.
    """
    moved, rate = _moved(kernel, what, call, device.sms or SMS), bandwidth(device)
    return {
        "passes": moved.beside / rate,
        "roof": max(moved.main / rate, tiles),
        "bytes": moved.main / rate,
        "shared": moved.added / rate,
        "grouped": LAUNCH * (call.heads != call.kv_heads),
        COPIES: copies_time(kernel, what, call, device),
        "masked": LAUNCH * (not call.mask.is_full),
        "lists": LAUNCH * has_ids(call),
        "lengths": LAUNCH * has_lengths_alone(call),
    }


def _moved(kernel: str, what: str, call: Call, sms: int) -> Moved:
    if what == FORWARD:
        return _forward(kernel, call, sms)
    if kernel == "tokamax_flash":
        return _tokamax(call)
    if kernel == "flash" and one_key_tile.takes_call(call):
        return _one_key_tile(call, sms)
    return _summed(kernel, call, sms)


def _forward(kernel: str, call: Call, sms: int) -> Moved:
    queries, keys = _seen(kernel, FORWARD, call, sms)
    shared = 2 * keys * call.heads / call.kv_heads * (call.heads != call.kv_heads)
    return Moved(0.0, 2 * queries + 2 * keys, shared)


def _tokamax(call: Call) -> Moved:
    queries, keys = entries(call)
    return Moved(2 * queries, 5 * queries + 6 * keys)


def _one_key_tile(call: Call, sms: int) -> Moved:
    """Count O and dO before; Q, dO, dQ, K, V, and dK and dV of each split; and their sums."""
    (queries, keys), splits = entries(call), one_key_tile.splits_for(shapes_of(call)[0], sms)
    sums = 2 * (splits + 1) * keys * (splits > 1)
    return Moved(2 * queries + sums, 3 * queries + 2 * (splits + 1) * keys)


def _summed(kernel: str, call: Call, sms: int) -> Moved:
    of = kernel, BACKWARD, call, sms
    (queries, keys), seen = _seen(*of), seen_shares(*of)
    of_queries, of_keys = (x * share for x, share in zip(_sums(kernel, call), seen, strict=True))
    zeros = 0.0 if kernel == "flash" and first_writes.takes_call(call) else of_queries
    beside, main = 3 * queries + of_queries + zeros, 2 * queries + of_queries + zeros + 4 * keys
    if call.heads == call.kv_heads:
        return Moved(beside, main)
    each = of_keys * call.kv_heads / call.heads
    return Moved(beside + 2 * each + 2 * keys, main, 2 * of_keys)


def _seen(kernel: str, what: str, call: Call, sms: int) -> tuple[float, float]:
    """Return the bytes of Q and of K that a kernel is given."""
    both = zip(entries(call), seen_shares(kernel, what, call, sms), strict=True)
    queries, keys = (each * share for each, share in both)
    return queries, keys


def _sums(kernel: str, call: Call) -> tuple[float, float]:
    """Return the bytes of float32 gradients of queries, and of keys of each query head.

    FlashAttention-4 pads both to whole tiles.
    """
    tile_of = whole_tile if call.mask.is_full else backward_tile
    tile = tile_of(call.head_dim, call.q_len) if kernel == "flash" else Tile(1, 1)
    wide = sums_width(call.head_dim) if kernel == "flash" else -(-call.head_dim // ROUND) * ROUND
    lanes = call.batch * call.heads
    queries, keys = (
        4.0 * lanes * wide * -(-length // size) * size
        for length, size in zip((call.q_len, call.kv_len), tile, strict=True)
    )
    return queries, 2 * keys


def copies_time(kernel: str, what: str, call: Call, device: Device) -> float:
    """Return ms of XLA's copies around a pass."""
    return sum(copy_time(x, device) for x in copies(kernel, what, call, device.sms or SMS))


def copy_time(moved: float, device: Device) -> float:
    """Return ms of a copy that moves so many bytes."""
    return COPY + moved / (REACHED * bandwidth(device))


def bandwidth(device: Device) -> float:
    """Return bytes a ms."""
    machine = device.machine or NAMED.machine
    assert machine is not None
    return machine.hbm / 1e3
