"""What FlashAttention-4 through fa4-jax 0.1.0 holds in 32 bits.

cutejax 0.1.5 gives the kernels int32 sizes and int64 strides. So an operand may have more than
2**31 elements: batch rows, heads and tokens are each an axis, and a plan refuses sequences of more
than 2**29 tokens. But a backward adds up dQ in one axis of tokens * channels, and under lengths,
where batch rows stand behind each other, of all rows.
"""

from __future__ import annotations

from maxattn.call import Call, Reason
from maxattn.kernels.base import USE_AUTO
from maxattn.masks.terms import Terms

MOST_INT32 = 2**31 - 1
PAD = 256  # more than any tile, to which the sums of each row are padded


def refuse(call: Call, terms: Terms) -> Reason | None:
    """Refuse more tokens than the axis of the float32 sums of a backward holds.

    Args:
        call: of one device.
        terms: of its mask.
    """
    step = 32 if call.head_dim <= 128 else 64
    width = -(-call.head_dim // step) * step
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
