"""What block sizes pad, and which would pad less, in words: for plans, and as a table."""

from __future__ import annotations

from collections.abc import Iterator

from maxattn.block_sizes.chips import chip_of
from maxattn.block_sizes.padding import nearest_with_less_padding, padding
from maxattn.block_sizes.recommend import recommend
from maxattn.block_sizes.sizes import LANES, BlockSizes
from maxattn.call import Call
from maxattn.target import Target

MUCH = 0.10  # padding beyond this share of the tokens is worth a note in the plan


def padding_text(length: int, block: int, step: int = LANES) -> str:
    """Say what a block size pads, and which sizes near it pad less.

    Args:
        length: real tokens.
        block: tokens per block.
        step: what the sizes offered are a multiple of.
    """
    padded, share = padding(length, block)
    if padded == length:
        return f"{block:,} pads nothing of {length:,} tokens"
    text = f"{block:,} pads {length:,} tokens to {padded:,} ({percent(share)})"
    better = nearest_with_less_padding(length, block, step)
    if not better:
        return f"{text}; no multiple of {step} up to {max(2 * block, step):,} pads less"
    return f"{text}; less: " + ", ".join(
        f"{n:,} ({percent(padding(length, n).share)})" for n in better
    )


def percent(share: float) -> str:
    """Write a share with as many digits as tell it from nothing."""
    return f"{100 * share:.2f}%" if share < MUCH else f"{100 * share:.0f}%"


def padding_notes(local: Call, sizes: BlockSizes | None) -> tuple[str, ...]:
    """Return a note for each of block_q and block_kv that pads self-attention by more than 10%.

    Args:
        local: what one device computes.
        sizes: the sizes it runs with; None for a kernel without any.
    """
    if sizes is None or local.role == "cross":
        return ()
    lengths = (("block_q", local.q_len, sizes.block_q), ("block_kv", local.kv_len, sizes.block_kv))
    much = [
        (key, length, block)
        for key, length, block in lengths
        if padding(length, block).share > MUCH
    ]
    return tuple(f"{key}: {padding_text(length, block)}" for key, length, block in much)


def recommend_table(seq: int, head_dim: int, target: Target) -> str:
    """Print `recommend` as a table: sizes, what they pad, where they come from, and what pads less.

    Args:
        seq: tokens on one device.
        head_dim: H.
        target: the machine.
    """
    return "\n".join(_table_lines(seq, head_dim, target))


def _table_lines(seq: int, head_dim: int, target: Target) -> Iterator[str]:
    yield f"block sizes for {seq:,} tokens, head dim {head_dim}, {target.device_kind}"
    yield f"  {'q':>5} {'kv':>7}  {'pads q':>7} {'pads kv':>7}  source"
    rows = recommend(seq, head_dim, target)
    for row in rows:
        note = f" ({row.note})" if row.note else ""
        pads = f"{percent(row.padding_q):>7} {percent(row.padding_kv):>7}"
        yield f"  {row.block_q:>5,} {row.block_kv:>7,}  {pads}  {row.source}{note}"
    if chip_of(target) is not None:
        first = rows[0]
        yield f"  {padding_text(seq, first.block_q)}"
