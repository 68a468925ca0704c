"""What XLA copies before and after a kernel, whose arrays are not those of the call.

    padding     tokamax takes lengths that 8 divides, in the forward keys that its tile divides;
                tokamax takes some head dims. What is longer is cut again.
    pieces      a triangle beside a rectangle is two calls, whose results are merged
    rows        outputs and gradients of queries that see no key, or may see none, are made 0

A copy is read and written once.
"""

from __future__ import annotations

from maxattn.call import Call
from maxattn.kernels.auto.tile_work import (
    has_ids,
    has_lengths_alone,
    is_causal,
    positions_of,
    tokamax_forward_tile,
)
from maxattn.kernels.fa4 import band_lists, windows
from maxattn.kernels.fa4.tile_sizes import shapes_of
from maxattn.masks.band_pieces import Piece, pieces
from maxattn.masks.terms import sort_terms

TOKAMAX_LENGTHS, TOKAMAX_HEADS = 8, (16, 64)  # of the forward, of the backward
Copies = list[float]
"""Bytes that each copy moves."""


def copies(kernel: str, what: str, call: Call, sms: int) -> Copies:
    """Return what is copied around a kernel's pass.

    Args:
        kernel: its name.
        what: "forward" or "backward".
        call: that the kernel takes.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    backward = what == "backward"
    found = _of_rows(kernel, backward, call, sms) + _of_pieces(kernel, backward, call, sms)
    if kernel == "tokamax_flash":
        found += _tokamax_padding(backward, call)
    return found


def entries(call: Call) -> tuple[float, float]:
    """Return the bytes of Q and of K, or the mean of Q and out, and of K and V."""
    dim = (call.head_dim + call.value_dim) / 2
    queries = 2.0 * call.batch * call.q_len * call.heads * dim
    return queries, 2.0 * call.batch * call.kv_len * call.kv_heads * dim


def calls_of(kernel: str, what: str, call: Call, sms: int) -> int:
    """Return into how many calls of a library a pass is cut; arguments as for `copies`."""
    return max(1, len(_pieces(kernel, what == "backward", call, sms)))


def seen_shares(kernel: str, what: str, call: Call, sms: int) -> tuple[float, float]:
    """Return the shares of the queries and of the keys that a kernel is given.

    A window leaves out keys before the first query's; and queries behind the last key, where
    FlashAttention-4 takes it as a band (windows.py). By lists it is given all keys, and its forward
    reads those that the lists visit.
    """
    cut = _pieces(kernel, what == "backward", call, sms)
    if not cut and (kernel, what) == ("flash", "forward"):
        return 1.0, _listed_keys(call)
    if len(cut) != 1:
        return 1.0, 1.0
    p = cut[0]
    rows, keys = p.q1 - p.q0, p.k1 - p.k0
    if kernel == "flash":
        rows, keys, _ = windows.fitted(p, rows, keys)
    return rows / call.q_len, keys / call.kv_len


def _listed_keys(call: Call) -> float:
    """Return the share of the keys that lists of a band visit."""
    cut = _cut(call)
    ends = [p.k0 + windows.fitted(p, p.q1 - p.q0, p.k1 - p.k0)[1] for p in cut]
    return (max(ends) - min(p.k0 for p in cut)) / call.kv_len if ends else 1.0


# ---- padding -------------------------------------------------------------------------------------


def _tokamax_padding(backward: bool, call: Call) -> Copies:
    queries, keys = entries(call)
    heads = call.head_dim % TOKAMAX_HEADS[backward]
    pads_queries = bool(heads or call.q_len % TOKAMAX_LENGTHS)
    of_keys = TOKAMAX_LENGTHS if backward else tokamax_forward_tile(call.head_dim).keys
    pads_keys = bool(heads or call.kv_len % of_keys)
    # Q and out, K and V; of a backward Q, dout and dQ, and K, V and their gradients.
    many = (3, 4) if backward else (2, 2)
    return [2 * queries] * (many[0] * pads_queries) + [2 * keys] * (many[1] * pads_keys)


# ---- rows, pieces --------------------------------------------------------------------------------


def _of_rows(kernel: str, backward: bool, call: Call, sms: int) -> Copies:
    queries, _ = entries(call)
    leaves = kernel == "flash" and backward and band_lists.leaves_queries(call)
    if has_ids(call) or (leaves and _goes_by_lists(backward, call, sms)):
        return [2 * queries] * backward
    positions = positions_of(call.mask)
    intervals = kernel == "tokamax_flash" and not (positions.is_full or is_causal(positions))
    cut = seen_shares(kernel, "backward" if backward else "forward", call, sms)[0] < 1
    # What was cut off is put back; of a backward dout is read whole beside it.
    back = [queries, 2 * queries] if backward else [queries]
    return back * cut + [2 * queries] * (intervals or has_lengths_alone(call))


def _of_pieces(kernel: str, backward: bool, call: Call, sms: int) -> Copies:
    cut, (queries, keys) = _pieces(kernel, backward, call, sms), entries(call)
    found: Copies = []
    if len(cut) > 1:  # both write results of all queries, which are merged
        found += [4 * queries, 3 * queries] if backward else [2 * queries, 3 * queries]
    shares = [(p.k1 - p.k0) / call.kv_len for p in cut]
    if min(shares, default=1.0) == 1.0:
        return found
    found += [2 * share * keys for share in shares] * 2
    # The pieces' gradients are put among those of all keys.
    return found + [(1 + sum(shares)) * keys] * 2 * backward


def _pieces(kernel: str, backward: bool, call: Call, sms: int) -> tuple[Piece, ...]:
    cut = _cut(call)
    if cut and kernel == "flash" and _goes_by_lists(backward, call, sms):
        return ()
    if kernel == "tokamax_flash" and not is_causal(positions_of(call.mask)):
        return ()
    return cut


def _cut(call: Call) -> tuple[Piece, ...]:
    """Cut a band into rectangles; none of any other mask, nor beside ids."""
    positions = positions_of(call.mask)
    band = positions.band()
    if has_ids(call) or band is None or positions.is_full:
        return ()
    return pieces(band, band.offset, call.q_len, call.kv_len)


def _goes_by_lists(backward: bool, call: Call, sms: int) -> bool:
    """Tell whether FlashAttention-4 takes a band by block-sparse lists, in one launch."""
    if sort_terms(call.mask).keys:
        return True
    listed = band_lists.lists_backward if backward else band_lists.lists_forward
    return listed(call, *shapes_of(call), sms)
