"""Masks as the fused kernels of GPU libraries take them: a band round the diagonal, and how many
keys are real.

A bound mask is split into terms of positions and terms of keys alone. Keys are real up to a length,
or by flags; flags become lengths when the real keys are gathered to the front, which attention
without positions does not notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from maxattn.call import Call, Reason
from maxattn.kernels.base import Offset
from maxattn.masks import Band, Mask

REMEDY = "set attention: auto"


@dataclass(frozen=True)
class Parts:
    """Hold a mask as a conjunction of what depends on positions and what depends on keys alone.

    Args:
        positions: masks without arrays that depend on queries and keys.
        limits: masks without arrays that depend on keys alone.
        keys: masks with arrays that depend on keys alone.
        rest: everything else.
    """

    positions: tuple[Mask, ...]
    limits: tuple[Mask, ...]
    keys: tuple[Mask, ...]
    rest: tuple[Mask, ...]

    @property
    def band(self) -> Band | None:
        """The one band of the positions, or None where they are something else."""
        if len(self.positions) > 1:
            return None
        for mask in self.positions:
            return mask.band()
        return Band()

    @property
    def has_flags(self) -> bool:
        """Whether keys are real by flags, in no order."""
        return any(term.key_limit() is None for term in (*self.limits, *self.keys))


def split(mask: Mask) -> Parts:
    """Sort the terms of a bound mask, or of its form."""
    positions, limits, keys, rest = [], [], [], []
    for term in mask.terms():
        if term.is_full:
            continue
        if term.is_of_keys:
            (keys if term.has_data else limits).append(term)
        else:
            (rest if term.has_data else positions).append(term)
    return Parts(tuple(positions), tuple(limits), tuple(keys), tuple(rest))


def refuse_mask(who: str, parts: Parts, rows: bool = False) -> Reason | None:
    """Return why a kernel that takes bands and lengths cannot take a mask.

    Args:
        who: the kernel.
        parts: from `split`.
        rows: whether it takes any interval of keys for each query, too.
    """
    if parts.rest:
        term = parts.rest[0]
        kind = " and ".join(term.names())
        rule = f"it takes lengths and flags of keys, and {kind} is neither"
        return Reason(who, f"mask {kind}", rule, REMEDY)
    if parts.band is None and not rows:
        term = " & ".join(str(m) for m in parts.positions)
        return Reason(who, "mask", f"it takes Causal and windows of tokens, and not {term}", REMEDY)
    if parts.has_flags and parts.positions:
        rule = (
            "it takes flags of keys by gathering the real ones, which moves their positions, and"
            " the mask needs those"
        )
        return Reason(
            who, "mask KeyPadding & positions", rule, f"say KeyPadding as lengths, or {REMEDY}"
        )
    return None


def refuse_call(who: str, call: Call, head_limit: int) -> Reason | None:
    """Return why no fused kernel of this limit can compute a call: dtype, head dim, bias."""
    if call.dtype == "float32":
        rule = "it takes bfloat16 and float16, and the operands are float32"
        return Reason(who, "dtype float32", rule, f"cast q, k and v to bfloat16, or {REMEDY}")
    if call.head_dim > head_limit:
        rule = f"it takes head dims up to {head_limit}, and this is {call.head_dim}"
        return Reason(who, f"head dim {call.head_dim}", rule, REMEDY)
    if call.bias is not None:
        rule = "it would round an additive bias to the dtype of q"
        return Reason(who, "bias", rule, REMEDY)
    return None


def lengths_of(parts: Parts, batch: int, kv_len: int, kv_offset: Offset) -> Int[Array, " B"] | None:
    """Count the real local keys of each batch row, where they are the first ones; None where all
    are real.

    Flags are counted too: `packed` puts those keys first.
    """
    if not parts.limits and not parts.keys:
        return None
    if parts.has_flags:
        return jnp.sum(real_keys(parts, kv_len, kv_offset), axis=1).astype(jnp.int32) + jnp.zeros(
            batch, jnp.int32
        )
    terms = (*parts.limits, *parts.keys)
    ends = [
        jnp.broadcast_to(jnp.asarray(term.key_limit()).astype(jnp.int32), (batch,))
        for term in terms
    ]
    first = ends[0]
    for end in ends[1:]:
        first = jnp.minimum(first, end)
    return jnp.clip(first - kv_offset, 0, kv_len)


def real_keys(parts: Parts, kv_len: int, kv_offset: Offset) -> Bool[Array, "B S"]:
    """Tell which local keys every limit, length and flag allows; the batch may be 1."""
    real: Any = jnp.ones((1, kv_len), bool)
    for term in (*parts.limits, *parts.keys):
        ok = term.allowed(np.zeros(1, np.int32), jnp.arange(kv_len), 0, kv_offset)
        real = real & ok[:, 0, 0]
    return real
