"""Block sizes to start from, each with the source it comes from and what it pads."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from maxattn.block_sizes.adjust import adjust
from maxattn.block_sizes.chips import chip_of
from maxattn.block_sizes.estimated.defaults import estimated_sizes, how_estimated
from maxattn.block_sizes.hbm import fused_partials_bytes
from maxattn.block_sizes.padding import padding, padding_text, percent
from maxattn.block_sizes.sizes import LANES
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.devices import GIB
from maxattn.target import Target

ELEMENT = 2  # bytes, of bfloat16
SHORTEST, LONGEST = 256, 2048  # tokens, of the blocks tried for the least padding


class Recommendation(NamedTuple):
    """One recommendation.

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


def recommend(seq: int, head_dim: int, target: Target) -> tuple[Recommendation, ...]:
    """List block sizes for self-attention over `seq` tokens, what suits the target first.

    On a TPU: the fastest by estimates, the default of the rules, and the square blocks that pad
    least.

    Args:
        seq: tokens on one device.
        head_dim: H.
        target: the machine.
    """

    def row(source: str, q: int, kv: int, note: str = "", for_target: bool = True) -> None:
        pads = padding(seq, q).share, padding(seq, kv).share
        rows.append(Recommendation(source, q, kv, *pads, for_target, note))

    rows: list[Recommendation] = []
    if target.platform == "tpu":
        call = Call(1, seq, seq, 1, 1, head_dim, "bfloat16")
        for training, what in ((False, "forward"), (True, "forward and backward")):
            found = estimated_sizes("flash", call, target, training)
            if found is None or found.default is None or found.seconds == found.default:
                continue
            sizes, parts = found.sizes, fused_partials_bytes(call, found.sizes)
            note = f"{sizes}; {found.default.slow / found.seconds.slow:.2f} times as fast as the"
            note += " default"
            note += f"; its parts of dQ take {parts / GIB:.2f} GiB a head" if parts else ""
            row(f"fastest {what}, {how_estimated()}", sizes.block_q, sizes.block_kv, note)
        default, _ = adjust(FlashBlockSizes(), call, "flash", target, True)
        row("default of the rules", default.block_q, default.block_kv)
        squares = {
            n: adjust(FlashBlockSizes(block_q=n, block_kv=n), call, "flash", target, True)
            for n in range(SHORTEST, LONGEST + 1, LANES)
        }
        fitting = [n for n, (_, changes) in squares.items() if not changes]
        best = min(fitting, key=lambda n: (padding(seq, n).padded, -n), default=None)
        kept = default if best is None else squares[best][0]
        source = f"least padding of the multiples of {LANES} that fit in training"
        row(source, best or default.block_q, kept.block_kv)
    chip = chip_of(target)
    if memory := chip.limit if chip else target.device.family.shared_memory:
        elements = memory // ELEMENT
        note = f"B_c = ceil(M/4d), B_r = min(B_c, d), M = {elements:,} elements of bfloat16"
        note += "; ignores lanes, double buffers and the float32 scores" if chip else ""
        sizes = flash_attention_blocks(elements, head_dim)
        row("FlashAttention, algorithm 1 (arXiv 2205.14135)", *sizes, note, False)
    return tuple(rows)


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


def recommend_table(seq: int, head_dim: int, target: Target) -> str:
    """Print `recommend` as a table: sizes, what they pad, where they come from, and what pads less.

    Args:
        seq: tokens on one device.
        head_dim: H.
        target: the machine.
    """
    lines = [
        f"block sizes for {seq:,} tokens, head dim {head_dim}, {target.device_kind}",
        f"  {'q':>5} {'kv':>7}  {'pads q':>7} {'pads kv':>7}  source",
    ]
    rows = recommend(seq, head_dim, target)
    for row in rows:
        note = f" ({row.note})" if row.note else ""
        pads = f"{percent(row.padding_q):>7} {percent(row.padding_kv):>7}"
        lines.append(f"  {row.block_q:>5,} {row.block_kv:>7,}  {pads}  {row.source}{note}")
    if not rows:
        lines.append("  none: no kernel on it reads block sizes")
    if target.platform == "tpu":
        lines.append(f"  {padding_text(seq, rows[0].block_q)}")
    return "\n".join(lines)
