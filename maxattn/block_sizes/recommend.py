"""Block sizes to start from, each with the source it comes from and what it pads."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from maxattn.block_sizes.adjust import adjust
from maxattn.block_sizes.chips import chip_of
from maxattn.block_sizes.estimated.defaults import estimated_sizes, how_estimated
from maxattn.block_sizes.hbm import fused_partials_bytes
from maxattn.block_sizes.padding import padding
from maxattn.block_sizes.sizes import LANES, BlockSizes, Change
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.devices import GIB
from maxattn.target import Target

ELEMENT = 2  # bytes, of bfloat16
SHORTEST, LONGEST = 256, 2048  # tokens, of the blocks tried for the least padding

# (longest sequence, block q, block kv), head dim 64; beyond the last row, the last row.
LDS_TABLE = ((512, 64, 64), (2048, 64, 64), (8192, 32, 128))
LDS_SOURCE = "table for 64 KiB of LDS, head dim 64 (AMD MI100)"


class Recommendation(NamedTuple):
    """Hold one recommendation.

    Args:
        source: where the sizes come from.
        block_q, block_kv: tokens.
        padding_q, padding_kv: tokens that they add, as a share of the sequence.
        for_target: whether the target's kernels take these sizes as they are.
        note: what to know before using them, or empty.
    """

    source: str
    block_q: int
    block_kv: int
    padding_q: float
    padding_kv: float
    for_target: bool
    note: str = ""


def flash_attention_blocks(memory: int, head_dim: int) -> tuple[int, int]:
    """Compute FlashAttention's blocks: B_c = ceil(M / 4d), B_r = min(B_c, d).

    Args:
        memory: M, elements that fit the on-chip memory of one streaming multiprocessor (SM): not
            bytes, and not of the whole chip.
        head_dim: d.

    Returns:
        (B_r, B_c): rows of queries, columns of keys.

    Source: Dao et al., FlashAttention (arXiv 2205.14135), algorithm 1, line 1.
    """
    columns = ceil(memory / (4 * head_dim))
    return min(columns, head_dim), columns


def recommend(seq: int, head_dim: int, target: Target) -> tuple[Recommendation, ...]:
    """List block sizes for self-attention over `seq` tokens, what suits the target first.

    Args:
        seq: tokens on one device.
        head_dim: H.
        target: the machine.
    """
    return (
        *_tpu_rows(seq, head_dim, target),
        *_formula_rows(seq, head_dim, target),
        _table_row(seq, target),
    )


def _tpu_rows(seq: int, head_dim: int, target: Target) -> list[Recommendation]:
    """Give the fastest by estimates, the rules' default, and the square blocks that pad least."""
    if target.platform != "tpu":
        return []
    call = Call(1, seq, seq, 1, 1, head_dim, "bfloat16")
    default, _ = adjust(FlashBlockSizes(), call, "flash", target, True)
    fitting = [n for n in range(SHORTEST, LONGEST + 1, LANES) if not _asked(n, call, target)[1]]
    best = min(fitting, key=lambda n: (padding(seq, n).padded, -n), default=default.block_q)
    estimated = [
        row for training in (False, True) for row in _estimated_row(call, target, training)
    ]
    source = f"least padding of the multiples of {LANES} that fit in training"
    return [
        *estimated,
        _row("default of the rules", default.block_q, default.block_kv, seq, True, ""),
        _row(source, best, _asked(best, call, target)[0].block_kv, seq, True, ""),
    ]


def _estimated_row(call: Call, target: Target, training: bool) -> list[Recommendation]:
    """Give the fastest sizes of a pass by the estimates that ship, where they beat the rules'."""
    found = estimated_sizes("flash", call, target, training)
    if found is None or found.default is None or found.seconds == found.default:
        return []
    what = "forward and backward" if training else "forward"
    gain = f"{found.default.slow / found.seconds.slow:.2f} times as fast as the default"
    sizes, parts = found.sizes, fused_partials_bytes(call, found.sizes)
    gain += f"; its parts of dQ take {parts / GIB:.2f} GiB a head" if parts else ""
    return [
        _row(f"fastest {what}, {how_estimated()}", sizes.block_q, sizes.block_kv, call.q_len, True,
             f"{sizes}; {gain}"),
    ]  # fmt: skip


def _asked(size: int, call: Call, target: Target) -> tuple[BlockSizes, tuple[Change, ...]]:
    return adjust(FlashBlockSizes(block_q=size, block_kv=size), call, "flash", target, True)


def _formula_rows(seq: int, head_dim: int, target: Target) -> list[Recommendation]:
    chip = chip_of(target)
    memory = chip.limit if chip else target.device.family.shared_memory
    if not memory:
        return []
    rows, columns = flash_attention_blocks(memory // ELEMENT, head_dim)
    note = f"B_c = ceil(M/4d), B_r = min(B_c, d), M = {memory // ELEMENT:,} elements of bfloat16"
    if chip:
        note += "; ignores lanes, double buffers and the float32 scores"
    return [_row("FlashAttention, algorithm 1 (arXiv 2205.14135)", rows, columns, seq, False, note)]


def _table_row(seq: int, target: Target) -> Recommendation:
    _, q, kv = next((row for row in LDS_TABLE if seq <= row[0]), LDS_TABLE[-1])
    note = "" if seq <= LDS_TABLE[-1][0] else f"the table ends at {LDS_TABLE[-1][0]:,} tokens"
    return _row(LDS_SOURCE, q, kv, seq, False, note)


def _row(source: str, q: int, kv: int, seq: int, for_target: bool, note: str) -> Recommendation:
    return Recommendation(
        source, q, kv, padding(seq, q).share, padding(seq, kv).share, for_target, note
    )
