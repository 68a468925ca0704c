"""Whole numbers inside a Pallas TPU kernel, in operations that lower on any machine.

jax lowers `//` of int32 through `sign`, which asks which TPU this machine has; lowering for a TPU
that is elsewhere then fails. Here `//` is a truncating division and a correction.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


class KernelInts:
    """Wrap an array so that masks can compute with it; `KernelNumpy` stands for their `xp`."""

    def __init__(self, array: Any) -> None:
        """Wrap an int32 array (or a boolean one, from a comparison)."""
        self.array = array

    def __floordiv__(self, n: int) -> KernelInts:
        """Divide by a positive number, rounding down."""
        divisor = jnp.full(self.array.shape, n, self.array.dtype)
        below = jax.lax.rem(self.array, divisor) < 0
        return KernelInts(jax.lax.div(self.array, divisor) - below.astype(self.array.dtype))


def _operation(f: Callable[..., Any]) -> Any:
    return lambda *args: KernelInts(f(*(unwrap(x) for x in args)))


for _name in ("add", "sub", "mul", "lt", "le", "gt", "ge"):
    setattr(KernelInts, f"__{_name}__", _operation(getattr(operator, _name)))
for _name in ("add", "sub", "mul"):
    _swapped = (lambda op: lambda mine, other: op(other, mine))(getattr(operator, _name))
    setattr(KernelInts, f"__r{_name}__", _operation(_swapped))


class KernelNumpy:
    """The three functions of numpy that masks of positions use, on `KernelInts`."""

    where = staticmethod(_operation(jnp.where))
    minimum = staticmethod(_operation(jnp.minimum))
    maximum = staticmethod(_operation(jnp.maximum))


def unwrap(x: Any) -> Any:
    """Return the array inside, and anything else as it is."""
    return x.array if isinstance(x, KernelInts) else x
