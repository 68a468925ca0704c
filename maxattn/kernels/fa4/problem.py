"""What one device computes, as a hashable value: shapes, and the kind of mask.

    dense      all pairs
    lengths    the first keys of each batch row: lengths, or flags, whose keys are gathered first
    known      a mask of positions that are known when tracing: lists are constants
    ids        segment ids, or lengths beside positions: lists of each batch row, made on the device
    traced     a mask of positions that are known on the device alone

`of_call` makes it for a plan and `of_inputs` for what runs; both give the same value.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

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
    """What a launch is decided from.

    Args:
        batch, q_len, kv_len, heads, kv_heads: B, T, S, N, K.
        head_dim: H, padded to a multiple of 8.
        kind: the kind of mask.
        mask: the mask of positions of kind `known`, or beside ids of kind `ids`.
        offsets: positions of the first query and key, for `mask`.
        own_rows: whether batch rows have lists of their own.
        bias: whether batch rows and heads have a bias of their own; None for no bias.
        sms: streaming multiprocessors, each of which runs one thread block at a time.
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    kind: Kind = "dense"
    mask: Mask = Full()
    offsets: tuple[int, int] = (0, 0)
    own_rows: bool = False
    bias: tuple[bool, bool] | None = None
    sms: int = 0

    @property
    def has_lists(self) -> bool:
        """Whether a kernel goes by lists of tiles."""
        return self.kind in ("known", "ids", "traced")

    @property
    def lanes(self) -> int:
        """Heads of all batch rows."""
        return self.batch * self.heads

    def steps(self, tile: Tile, by: str) -> np.ndarray:
        """Count the tiles that each tile row goes through.

        Args:
            tile: queries and keys of a tile.
            by: "queries" for tile rows of queries, "keys" for those of keys.
        """
        if self.kind == "known":
            lengths = self.q_len, self.kv_len
            return lists.of_positions(self.mask, tile, lengths, self.offsets, by).work
        sizes = -(-self.q_len // tile.queries), -(-self.kv_len // tile.keys)
        rows, steps = sizes if by == "queries" else sizes[::-1]
        return np.full(rows, max(1, round(steps * UNKNOWN.get(self.kind, 1.0))))


def of_call(call: Call, sms: int, sharded: bool = False) -> Problem:
    """Describe a local call; `sharded`: its positions are known on the device alone."""
    own_rows = any("B" in axes for axes in jax.tree.leaves(call.mask.leaf_axes()))
    sizes = call.batch, call.q_len, call.kv_len, call.heads, call.kv_heads, call.head_dim
    offsets = (None, None) if sharded else (0, 0)
    return _problem(sizes, call.mask, offsets, own_rows, call.bias, sms)


def of_inputs(inputs: Inputs, sms: int) -> Problem:
    """Describe local arrays."""
    (batch, q_len, heads, head_dim), (_, kv_len, kv_heads, _) = inputs.q.shape, inputs.k.shape
    sizes = batch, q_len, kv_len, heads, kv_heads, head_dim
    at = inputs.q_offset, inputs.kv_offset
    traced = any(isinstance(x, jax.Array) for x in at)
    offsets = (None, None) if traced else (int(at[0]), int(at[1]))
    own_rows = any(x.shape[0] == batch > 1 for x in jax.tree.leaves(inputs.mask))
    bias = None if inputs.bias is None else inputs.bias.shape
    return _problem(sizes, inputs.mask.form(), offsets, own_rows, bias, sms)


def _problem(
    sizes: Any, mask: Mask, offsets: Any, own_rows: bool, bias: tuple[int, ...] | None, sms: int
) -> Problem:
    batch, q_len, kv_len, heads, kv_heads, head_dim = sizes
    padded = -(-head_dim // 8) * 8
    made = Problem(batch, q_len, kv_len, heads, kv_heads, padded, sms=sms)
    if bias is not None:  # every mask is written into it (kernels/flash.py)
        return made._replace(bias=(bias[0] > 1, bias[1] > 1))
    terms = sort_terms(mask)
    if not terms.positions and not terms.rest:
        return made._replace(kind="lengths") if terms.limits or terms.keys else made
    split = supported_split(mask)
    is_known = offsets[0] is not None
    at = offsets if is_known and not split.positions.is_full else (0, 0)
    if split.has_ids:
        positions = split.positions if is_known else Full()
        own_rows = own_rows and made.batch > 1
        return made._replace(kind="ids", mask=positions, offsets=at, own_rows=own_rows)
    if not is_known:
        return made._replace(kind="traced")
    found = made._replace(kind="known", mask=split.positions, offsets=at)
    return made if allows_all(found) else found


def allows_all(problem: Problem) -> bool:
    """Return whether a mask of known positions allows all pairs, as a wide window does."""
    tile, lengths = Tile(128, 128), (problem.q_len, problem.kv_len)
    if _count(problem, tile) > lists.MOST_TILES:
        return False
    found = lists.of_positions(problem.mask, tile, lengths, problem.offsets, "queries")
    return found.work.min() == -(-lengths[1] // tile.keys) and not found.has_mixed


# ---- what fa4-jax 0.1 takes ----------------------------------------------------------------------
# Compute capability 9.x runs its Hopper kernels and 10.x those of Blackwell; the others, and
# backwards that these two do not take, run its kernels for Ampere, in tiles that fit their shared
# memory. tests/gpu/test_fa4_capabilities.py compares the table with the library's own checks.

# By the first number of the compute capability: forward and backward, every dtype, mask and
# grouping of heads that the library takes.
HEAD_LIMITS = {8: 256, 9: 256, 10: 128, 12: 256}
MOST_INT32 = 2**31 - 1
PAD = 256  # more than any tile, to which the sums of each batch row are padded


def has_kernels(device: Device) -> bool:
    """Return whether fa4-jax has kernels for a GPU; assumed of an unknown GPU."""
    return device.capability is None or device.capability[0] in HEAD_LIMITS


def lack(device: Device) -> str:
    """Return the rule that fa4-jax has no kernels for a GPU."""
    return f"fa4-jax has no kernels for compute capability {device.capability_text}"


def refuse_operands(call: Call, device: Device) -> Reason | None:
    """Return why fa4-jax cannot compute a call on a GPU, but for its mask and bias."""
    if not has_kernels(device):
        takes = ", ".join(f"{major}.x" for major in HEAD_LIMITS)
        return Reason("flash", "device", f"{lack(device)}, but for {takes}", USE_AUTO)
    limit, text = head_limit(device), device.capability_text
    named = f"compute capability {text}" if text else device.kind
    is_less = limit < max(HEAD_LIMITS.values())
    return refuse_call("flash", call, limit, named if is_less else "")


def head_limit(device: Device) -> int:
    """Return the largest head dim on a GPU, the least of all if it is not known."""
    least = min(HEAD_LIMITS.values())
    return HEAD_LIMITS.get(device.capability[0], least) if device.capability else least


def refuse_length(call: Call, terms: Terms) -> Reason | None:
    """Refuse more tokens than the axis of the float32 sums of a backward holds.

    cutejax 0.1 gives the kernels int32 sizes and int64 strides. A backward sums dQ along one
    axis of tokens * channels; with lengths, GPUs other than Hopper lay all batch rows along it.
    """
    width = sums_width(call.head_dim)
    rows = call.batch if terms.limits or terms.keys else 1
    tokens = rows * (max(call.q_len, call.kv_len) + PAD)
    if tokens * width <= MOST_INT32:
        return None
    rule = (
        f"its backward sums gradients in one axis of at most {MOST_INT32} numbers, and"
        f" {tokens} tokens of {width} channels are {tokens * width}"
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
