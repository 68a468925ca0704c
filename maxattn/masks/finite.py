"""`check_finite: true`: name the numbers of a call that are NaN or infinite.

A kernel weighs a hidden key by 0, and 0 * NaN is NaN: such a number reaches every query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from maxattn.errors import InputError
from maxattn.jax_private.mesh import is_tracer
from maxattn.masks.base import Mask


class NotFinite(NamedTuple):
    """The numbers of one operand that are not finite.

    Args:
        count: how many numbers.
        first: the index of the first one, a number for each axis.
        is_hidden: whether the mask hides the first one's key from every query.
    """

    count: Int[Array, ""]
    first: Int[Array, "..."]
    is_hidden: Bool[Array, ""]


def check_finite(operands: dict[str, Any], mask: Mask) -> None:
    """Refuse NaN and infinity in q, k, v or bias; a bias may be -inf.

    Traced operands are looked at where the program runs, which then ends in the same error.

    Args:
        operands: q [B, T, N, H], k, v [B, S, K, H] and bias [B|1, N|1, T|1, S|1] by name, or None.
        mask: bound to them.

    Raises:
        InputError: naming the first operand, how many numbers, and where the first one is.
    """
    there = {name: x for name, x in operands.items() if x is not None}
    found = {name: _count(name, x, there["q"].shape[1], mask) for name, x in there.items()}
    if any(is_tracer(x) for x in jax.tree.leaves(found)):
        jax.debug.callback(_refuse, found)
    else:
        _refuse(found)


def _count(name: str, x: Array, q_len: int, mask: Mask) -> NotFinite:
    bad = jnp.isnan(x) | (x == jnp.inf) if name == "bias" else ~jnp.isfinite(x)
    count, index = bad.sum(dtype=jnp.int32), []
    while bad.ndim:  # axis by axis: one flat index may be beyond int32
        index.append(jnp.argmax(bad.any(axis=tuple(range(1, bad.ndim)))))
        bad = bad[index[-1]]
    first, is_hidden = jnp.stack(index), jnp.array(False)
    if name in ("k", "v"):
        seen = mask.allowed(jnp.arange(q_len), first[1:2])  # [B|1, N|1, T|1, 1]
        is_hidden = ~jnp.any(seen[jnp.minimum(first[0], seen.shape[0] - 1)])
    return NotFinite(count, first, is_hidden)


def _refuse(found: dict[str, NotFinite]) -> None:
    for name, (count, first, is_hidden) in found.items():
        if int(count):
            where = ", ".join(str(int(i)) for i in np.asarray(first))
            hidden = ", a key that the mask hides" if is_hidden else ""
            value = f"NaN or infinity {int(count)} times, first at [{where}]{hidden}"
            rule = "with check_finite: true all are finite, since a hidden key's 0 * NaN is NaN too"
            raise InputError(name, value, rule, f"replace them, e.g. jnp.nan_to_num({name})")
