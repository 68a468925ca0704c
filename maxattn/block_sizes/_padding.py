"""How many tokens of padding a block size adds, and which sizes near it add fewer."""

from __future__ import annotations

from typing import NamedTuple

from maxattn.block_sizes.sizes import LANES, BlockSizes, round_up
from maxattn.call import Call

MUCH = 0.10  # a plan notes padding beyond this share of the tokens


class Padding(NamedTuple):
    """A padded length in tokens, and the padding as a share of the real length."""

    padded: int
    share: float


def padding(length: int, block: int) -> Padding:
    """Return ceil(length / block) * block, and (padded - length) / length."""
    padded = round_up(length, block)
    return Padding(padded, (padded - length) / length)


def nearest_with_less_padding(length: int, block: int, step: int = LANES) -> tuple[int, ...]:
    """Find up to three multiples of `step` up to twice a block that pad less, nearest first."""
    now = padding(length, block).padded
    last = min(max(2 * block, step), round_up(length, step))
    better = [n for n in range(step, last + 1, step) if padding(length, n).padded < now]
    return tuple(sorted(better, key=lambda size: (abs(size - block), size))[:3])


def padding_text(length: int, block: int, step: int = LANES) -> str:
    """Return as text how much a block size pads, and which multiples of `step` near it pad less."""
    padded, share = padding(length, block)
    if padded == length:
        return f"{block:,} adds no padding to {length:,} tokens"
    text = f"{block:,} pads {length:,} tokens to {padded:,} ({percent(share)})"
    better = nearest_with_less_padding(length, block, step)
    if not better:
        return f"{text}; no multiple of {step} up to {max(2 * block, step):,} pads less"
    less = (f"{n:,} ({percent(padding(length, n).share)})" for n in better)
    return f"{text}; less: {', '.join(less)}"


def percent(share: float) -> str:
    """Return a share as text; a small share has two decimals, so that it is not "0%"."""
    return f"{100 * share:.2f}%" if share < MUCH else f"{100 * share:.0f}%"


def padding_notes(local: Call, sizes: BlockSizes | None) -> tuple[str, ...]:
    """Return a note for block_q and for block_kv if it pads self-attention by more than 10%."""
    if sizes is None or local.role == "cross":
        return ()
    lengths = (("block_q", local.q_len, sizes.block_q), ("block_kv", local.kv_len, sizes.block_kv))
    return tuple(
        f"{key}: {padding_text(length, block)}"
        for key, length, block in lengths
        if padding(length, block).share > MUCH
    )
