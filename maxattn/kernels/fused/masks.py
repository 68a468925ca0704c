"""Masks as the fused kernels of GPU libraries take them: a band, and how many keys are real.

The terms of a bound mask are sorted into terms of positions and terms of keys alone. Keys are real
up to a length, or by flags; flags become lengths when the real keys are gathered to the front,
which does not change attention without positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from maxattn.call import Call, Reason
from maxattn.kernels.base import Offset
from maxattn.masks import Band, Mask

REMEDY = "set attention: auto"


@dataclass(frozen=True)
class MaskTerms:
    """Hold the terms of a mask, sorted by what they depend on; a pair must be allowed by all.

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


def sort_terms(mask: Mask) -> MaskTerms:
    """Sort the terms of a bound mask, or of its form."""
    positions, limits, keys, rest = [], [], [], []
    for term in mask.terms():
        if term.is_full:
            continue
        if term.is_of_keys:
            (keys if term.has_data else limits).append(term)
        else:
            (rest if term.has_data else positions).append(term)
    return MaskTerms(tuple(positions), tuple(limits), tuple(keys), tuple(rest))


def refuse_mask(who: str, terms: MaskTerms, rows: bool = False) -> Reason | None:
    """Return why a kernel that takes bands and lengths cannot take a mask.

    Args:
        who: the kernel.
        terms: from `sort_terms`.
        rows: whether it takes any interval of keys for each query, too.
    """
    if terms.rest:
        kind = " and ".join(terms.rest[0].names())
        rule = f"it takes lengths and flags of keys, and {kind} is neither"
        return Reason(who, f"mask {kind}", rule, REMEDY)
    if terms.band is None and not rows:
        text = " & ".join(str(m) for m in terms.positions)
        return Reason(who, "mask", f"it takes Causal and windows of tokens, and not {text}", REMEDY)
    return _refuse_flags(who) if terms.has_flags and terms.positions else None


def _refuse_flags(who: str) -> Reason:
    rule = (
        "it takes flags of keys by gathering the real ones, which moves their positions, and the"
        " mask needs those"
    )
    remedy = f"say KeyPadding as lengths, or {REMEDY}"
    return Reason(who, "mask KeyPadding & positions", rule, remedy)


def refuse_call(who: str, call: Call, head_limit: int, where: str = "") -> Reason | None:
    """Return why no fused kernel of this limit can compute a call: dtype, head dim, scale.

    Args:
        who: the kernel.
        call: of one device.
        head_limit: the largest head dim.
        where: the devices that have this limit, if others have a larger one.
    """
    if call.dtype == "float32":
        rule = "it takes bfloat16 and float16, and the operands are float32"
        return Reason(who, "dtype float32", rule, f"cast q, k and v to bfloat16, or {REMEDY}")
    if call.head_dim > head_limit:
        rule = f"{where and f'on {where} '}it takes head dims up to {head_limit}"
        rule = f"{rule}, and this is {call.head_dim}"
        return Reason(who, f"head dim {call.head_dim}", rule, REMEDY)
    if call.scale < 0:  # it takes the largest product for the largest score, and gives NaN
        rule = f"it takes scales above 0, and this is {call.scale:.3g}"
        return Reason(who, "scale below 0", rule, f"hand over -q with scale {-call.scale:.3g}")
    return None


def lengths_of(
    terms: MaskTerms, batch: int, kv_len: int, kv_offset: Offset
) -> Int[Array, " B"] | None:
    """Count the real local keys of each batch row; None where all are real.

    The real keys are the first ones. Flags are counted too: `RealKeys.packed` puts those keys
    first.
    """
    if not terms.limits and not terms.keys:
        return None
    if terms.has_flags:
        count = jnp.sum(real_keys(terms, kv_len, kv_offset), axis=1).astype(jnp.int32)
        return count + jnp.zeros(batch, jnp.int32)
    limits = [jnp.asarray(term.key_limit()) for term in (*terms.limits, *terms.keys)]
    ends = [jnp.broadcast_to(limit.astype(jnp.int32), (batch,)) for limit in limits]
    return jnp.clip(reduce(jnp.minimum, ends) - kv_offset, 0, kv_len)


def real_keys(terms: MaskTerms, kv_len: int, kv_offset: Offset) -> Bool[Array, "B S"]:
    """Tell which local keys every limit, length and flag allows; the batch may be 1."""
    real: Any = jnp.ones((1, kv_len), bool)
    for term in (*terms.limits, *terms.keys):
        ok = term.allowed(np.zeros(1, np.int32), jnp.arange(kv_len), 0, kv_offset)
        real = real & ok[:, 0, 0]
    return real
