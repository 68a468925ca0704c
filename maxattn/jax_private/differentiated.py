"""Which operands of a `custom_vjp` with `symbolic_zeros` are differentiated.

With this knowledge, a backward can skip an expensive gradient that is not needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.interpreters import ad


@jax.tree_util.register_static
@dataclass(frozen=True)
class IsDifferentiated:
    """Whether an operand is differentiated; a forward rule returns this as a residual."""

    value: bool


def plain_values(operands: Any) -> Any:
    """Return the arrays of a forward rule's operands."""
    return jax.tree.map(lambda x: x.value, operands, is_leaf=_is_primal)


def is_differentiated(operand: Any) -> IsDifferentiated:
    """Check whether any array in a forward rule's operand is differentiated."""
    leaves = jax.tree.leaves(operand, is_leaf=_is_primal)
    return IsDifferentiated(any(x.perturbed for x in leaves))


def is_array(tangent: Any) -> bool:
    """Check whether a tangent or cotangent is an array, and no symbolic zero or None."""
    return tangent is not None and not isinstance(tangent, SymbolicZero)


def whole_cotangents(cotangents: Any) -> Any:
    """Replace symbolic zeros by arrays of zeros."""

    def is_zero(x: Any) -> bool:
        return isinstance(x, SymbolicZero)

    return jax.tree.map(
        lambda x: ad.zeros_like_aval(x.aval) if is_zero(x) else x, cotangents, is_leaf=is_zero
    )


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)
