"""Which operands of a `custom_vjp` are differentiated, as `symbolic_zeros` shows its rules.

A backward that costs more for one operand can then leave that gradient out.
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
    """Whether an operand is differentiated, among the residuals of a forward rule."""

    value: bool


def plain_values(operands: Any) -> Any:
    """Return the arrays of a forward rule's operands."""
    return jax.tree.map(lambda x: x.value, operands, is_leaf=_is_primal)


def is_differentiated(operand: Any) -> IsDifferentiated:
    """Return whether any array of one of a forward rule's operands is differentiated."""
    leaves = jax.tree.leaves(operand, is_leaf=_is_primal)
    return IsDifferentiated(any(x.perturbed for x in leaves))


def whole_cotangents(cotangents: Any) -> Any:
    """Write out the gradients that are known to be 0."""

    def is_zero(x: Any) -> bool:
        return isinstance(x, SymbolicZero)

    def written_out(x: Any) -> Any:
        return ad.zeros_like_aval(x.aval) if is_zero(x) else x

    return jax.tree.map(written_out, cotangents, is_leaf=is_zero)


def _is_primal(x: Any) -> bool:
    return isinstance(x, CustomVJPPrimal)
