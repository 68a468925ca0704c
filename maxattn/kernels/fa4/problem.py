"""`Problem`: the shapes and the kind of mask that one device computes, as a hashable value.

    dense      all pairs are allowed
    lengths    the first keys of each batch row are allowed; keys that flags allow are moved there
    known      a mask of positions that are known when tracing; the lists of tiles are constants
    ids        segment ids, or lengths beside a mask of positions; lists are made on the device
    traced     a mask of positions that are known only on the device; lists are made there

`of_call` returns the problem of a plan, and `of_inputs` the same problem from the arrays.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import numpy as np

from maxattn.call import Call
from maxattn.devices import Device
from maxattn.errors import Reason
from maxattn.kernels.base import USE_AUTO, Inputs, refuse_call
from maxattn.kernels.fa4 import lists
from maxattn.kernels.fa4.tiles import Tile, backward_tile, forward_tiles, sums_width
from maxattn.masks import Full, Mask
from maxattn.masks.terms import Terms, sort_terms, supported_split

Kind = Literal["dense", "lengths", "known", "ids", "traced"]
# Assumed share of tiles that are not empty, if lists are made on the device.
UNKNOWN = {"ids": 0.25, "traced": 0.5}


class Problem(NamedTuple):
    """The values from which a launch is decided."""

    # batch, q_len, kv_len, heads, kv_heads: B, T, S, N (query heads), K (KV heads)
    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int  # H, padded to a multiple of 8
    kind: Kind = "dense"  # the kind of mask
    mask: Mask = Full()  # the mask of positions, for kinds `known` and `ids`; else `Full`
    # positions of the first query and of the first key, for `mask`
    offsets: tuple[int, int] = (0, 0)
    own_rows: bool = False  # whether each batch row has its own lists
    # (whether each batch row, whether each head has its own bias); None without a bias
    bias: tuple[bool, bool] | None = None
    sms: int = 0  # number of streaming multiprocessors; each runs one thread block at a time

    @property
    def has_lists(self) -> bool:
        """Whether a kernel reads lists of tiles."""
        return self.kind in ("known", "ids", "traced")

    @property
    def lanes(self) -> int:
        """Number of (batch row, query head) pairs."""
        return self.batch * self.heads

    def steps(self, tile: Tile, by: str) -> np.ndarray:
        """Return the number of tiles that each tile row visits, [rows].

        Args:
            tile: numbers of queries and keys in a tile.
            by: "queries" if a tile row is a query tile (forward), "keys" if a key tile (backward).
        """
        if self.kind == "known":
            lengths = self.q_len, self.kv_len
            return lists.work(self.mask, tile, lengths, self.offsets, by)
        sizes = -(-self.q_len // tile.queries), -(-self.kv_len // tile.keys)
        rows, steps = sizes if by == "queries" else sizes[::-1]
        return np.full(rows, max(1, round(steps * UNKNOWN.get(self.kind, 1.0))))


def of_call(call: Call, sms: int, sharded: bool = False) -> Problem:
    """Return a local call's problem; if `sharded`, positions are known only on the device."""
    own_rows = any("B" in axes for axes in jax.tree.leaves(call.mask.leaf_axes()))
    made = Problem(call.batch, call.q_len, call.kv_len, call.heads, call.kv_heads, call.head_dim)
    offsets = None if sharded else (0, 0)
    return _completed(made._replace(sms=sms), call.mask, offsets, own_rows, call.bias)


def of_inputs(inputs: Inputs, sms: int) -> Problem:
    """Return the problem of local arrays."""
    (batch, q_len, heads, head_dim), (_, kv_len, kv_heads, _) = inputs.q.shape, inputs.k.shape
    made = Problem(batch, q_len, kv_len, heads, kv_heads, head_dim, sms=sms)
    at = inputs.q_offset, inputs.kv_offset
    offsets = None if any(isinstance(x, jax.Array) for x in at) else (int(at[0]), int(at[1]))
    own_rows = any(x.shape[0] == batch > 1 for x in jax.tree.leaves(inputs.mask))
    bias = None if inputs.bias is None else inputs.bias.shape
    return _completed(made, inputs.mask.form(), offsets, own_rows, bias)


def _completed(
    made: Problem,
    mask: Mask,
    offsets: tuple[int, int] | None,
    own_rows: bool,
    bias: tuple[int, ...] | None,
) -> Problem:
    made = made._replace(head_dim=-(-made.head_dim // 8) * 8)
    if bias is not None:  # kernels/flash.py writes every mask into the bias
        return made._replace(bias=(bias[0] > 1, bias[1] > 1))
    terms = sort_terms(mask)
    if not terms.positions and not terms.rest:
        return made._replace(kind="lengths") if terms.limits or terms.keys else made
    split = supported_split(mask)
    at = (0, 0) if offsets is None or split.positions.is_full else offsets
    if split.has_ids:
        positions = Full() if offsets is None else split.positions
        own_rows = own_rows and made.batch > 1
        return made._replace(kind="ids", mask=positions, offsets=at, own_rows=own_rows)
    if offsets is None:
        return made._replace(kind="traced")
    found = made._replace(kind="known", mask=split.positions, offsets=at)
    return made if allows_all(found) else found


def allows_all(problem: Problem) -> bool:
    """Return whether a mask of known positions allows all pairs, as a wide window does."""
    tile, lengths = Tile(128, 128), (problem.q_len, problem.kv_len)
    if _count(problem, tile) > lists.MOST_TILES:
        return False
    if problem.offsets == (0, 0):
        empty, _, mixed = lists.tally(problem.mask, tile, lengths)
        return not mixed and not empty
    found = lists.of_positions(problem.mask, tile, lengths, problem.offsets, "queries")
    return found.work.min() == -(-lengths[1] // tile.keys) and not found.has_mixed


# ---- what fa4-jax 0.1 takes ----------------------------------------------------------------------
# fa4-jax has kernels for Hopper (compute capability 9.x) and Blackwell (10.x). Other GPUs, and
# backwards that these kernels refuse, run its kernels for Ampere, in tiles that fit the GPU's
# shared memory. tests/gpu/test_fa4_capabilities.py compares HEAD_LIMITS with the library's checks.

# Major compute capability -> the largest head dim that both passes take, with every dtype, mask and
# grouping of heads that the library takes.
HEAD_LIMITS = {8: 256, 9: 256, 10: 128, 12: 256}
MOST_INT32 = 2**31 - 1


def has_kernels(device: Device) -> bool:
    """Return whether fa4-jax has kernels for a GPU; True for an unknown GPU."""
    return device.capability is None or device.capability[0] in HEAD_LIMITS


def lack(device: Device) -> str:
    """Return the error text that fa4-jax has no kernels for a GPU."""
    return f"fa4-jax has no kernels for compute capability {device.capability_text}"


def refuse_operands(call: Call, device: Device) -> Reason | None:
    """Return why fa4-jax cannot compute a call on a GPU, or None; masks are checked elsewhere."""
    if not has_kernels(device):
        takes = ", ".join(f"{major}.x" for major in HEAD_LIMITS)
        return Reason("flash", "device", f"{lack(device)}, only for {takes}", USE_AUTO)
    limit, text = head_limit(device), device.capability_text
    named = f"compute capability {text}" if text else device.kind
    is_less = limit < max(HEAD_LIMITS.values())
    return refuse_call("flash", call, limit, named if is_less else "")


def head_limit(device: Device) -> int:
    """Return the largest head dim that a GPU takes; the smallest limit for an unknown GPU."""
    least = min(HEAD_LIMITS.values())
    return HEAD_LIMITS.get(device.capability[0], least) if device.capability else least


def refuse_length(call: Call, terms: Terms) -> Reason | None:
    """Refuse calls whose float32 sums of gradients have an axis too long for int32.

    cutejax 0.1 passes sizes as int32 and strides as int64. The sums have one axis of tokens *
    channels; with lengths, GPUs other than Hopper put all batch rows on that axis.
    """
    width = sums_width(call.head_dim)
    rows = call.batch if terms.limits or terms.keys else 1
    tokens = rows * (max(call.q_len, call.kv_len) + lists.PAD)  # sums are padded to whole tiles
    if tokens * width <= MOST_INT32:
        return None
    rule = (
        f"its backward sums gradients along an axis of at most {MOST_INT32} numbers, and"
        f" {tokens} tokens of {width} channels need {tokens * width}"
    )
    remedy = f"set context_parallel: ring or ulysses over more devices, or {USE_AUTO}"
    return Reason("flash", "length", rule, remedy)


def refuse_lists(problem: Problem) -> Reason | None:
    """Refuse more tiles than block-sparse lists have room for."""
    if not problem.has_lists:
        return None
    batch = problem.batch if problem.own_rows else 1
    most = lists.MOST_TILES if problem.kind == "known" else lists.MOST_TRACED_TILES // batch
    sizes = problem.head_dim, problem.q_len, problem.kv_len
    tiles = *forward_tiles(*sizes, listed=True), backward_tile(*sizes[:2], listed=True)
    many = max(_count(problem, tile) for tile in tiles)
    if many <= most:
        return None
    rule = f"its block-sparse lists have up to {most} tiles, and the call has {many}"
    remedy = f"set context_parallel: ring or ulysses over more devices, or {USE_AUTO}"
    return Reason("flash", "length", rule, remedy)


def _count(problem: Problem, tile: Tile) -> int:
    return -(-problem.q_len // tile.queries) * -(-problem.kv_len // tile.keys)
