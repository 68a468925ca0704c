"""Block sizes to start from on a TPU, each with its source and its padding."""

from __future__ import annotations

from typing import NamedTuple

from maxattn.block_sizes._adjust import adjust
from maxattn.block_sizes._padding import padding, padding_text, percent
from maxattn.block_sizes.estimated.choose import estimated_sizes, how_estimated
from maxattn.block_sizes.sizes import LANES, BlockSizes, fused_partials_bytes
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.devices import GIB
from maxattn.target import Target

SHORTEST, LONGEST = 256, 2048  # tokens: bounds of the square blocks that are tried


class Recommendation(NamedTuple):
    """Recommended block sizes, and where they come from."""

    source: str  # how the sizes were found
    block_q: int
    block_kv: int
    # padding_q, padding_kv: padding that each size adds, as a share of the sequence
    padding_q: float
    padding_kv: float
    note: str = ""  # the other sizes and their memory, or ""


def recommend(seq: int, head_dim: int, target: Target) -> tuple[Recommendation, ...]:
    """List block sizes for self-attention to `seq` tokens of a TPU, the fastest by estimates first.

    The rules' default and the square blocks that pad least come next. For other devices the list is
    empty, since their kernels read no block sizes.
    """
    if target.platform != "tpu":
        return ()
    call = Call(1, seq, seq, 1, 1, head_dim, "bfloat16")
    rows = []
    for training, what in ((False, "forward"), (True, "forward and backward")):
        found = estimated_sizes("flash", call, target, training)
        if found is None or found.default is None or found.seconds == found.default:
            continue
        gain = found.default.slow / found.seconds.slow
        note = f"{found.sizes}; {gain:.2f} times as fast as the default"
        if parts := fused_partials_bytes(call, found.sizes):
            note += f"; partial dQ take {parts / GIB:.2f} GiB per head"
        rows.append((f"fastest {what}, {how_estimated(target.device_kind)}", found.sizes, note))
    default, _ = adjust(FlashBlockSizes(), call, "flash", target, True)
    rows.append(("default of the rules", default, ""))
    squares: dict[int, BlockSizes] = {}
    for n in range(SHORTEST, LONGEST + 1, LANES):
        asked = FlashBlockSizes(block_q=n, block_kv=n)
        sizes, changes = adjust(asked, call, "flash", target, True)
        squares |= {} if changes else {n: sizes}
    best = min(squares, key=lambda n: (padding(seq, n).padded, -n), default=None)
    source = f"least padding of the multiples of {LANES} that fit in training"
    rows.append((source, default if best is None else squares[best], ""))
    return tuple(
        Recommendation(source, q, kv, padding(seq, q).share, padding(seq, kv).share, note)
        for source, sizes, note in rows
        for q, kv in ((sizes.block_q, sizes.block_kv),)
    )


def recommend_table(seq: int, head_dim: int, target: Target) -> str:
    """Return `recommend` as a text table: sizes, padding, source, and sizes that pad less."""
    title = f"block sizes for {seq:,} tokens, head dim {head_dim}, {target.device_kind}"
    rows = recommend(seq, head_dim, target)
    if not rows:
        return f"{title}\n  none: this device's kernels read no block sizes"
    lines = [title, f"  {'q':>5} {'kv':>7}  {'pads q':>7} {'pads kv':>7}  source"]
    for row in rows:
        note = f" ({row.note})" if row.note else ""
        pads = f"{percent(row.padding_q):>7} {percent(row.padding_kv):>7}"
        lines.append(f"  {row.block_q:>5,} {row.block_kv:>7,}  {pads}  {row.source}{note}")
    return "\n".join([*lines, f"  {padding_text(seq, rows[0].block_q)}"])
