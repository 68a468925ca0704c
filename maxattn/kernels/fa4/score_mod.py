"""A bias inside FlashAttention-4's Hopper kernels (the library's `score_mod`): an array is read for
each pair, and added to the score in float32.

The library's backward has no gradient of the array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple


class BiasAxes(NamedTuple):
    """Say which axes of a bias [B or 1, N or 1, T, S] are whole; a kernel is compiled for it."""

    batch: bool
    heads: bool

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> BiasAxes:
        """Read the axes off a shape; of one batch row or head either says the same."""
        return cls(shape[0] > 1, shape[1] > 1)


@cache
def bias_adder(axes: BiasAxes) -> Callable[..., Any]:
    """Write the sum of a score and a bias in the form that the kernels call."""
    to_vector = import_module("fa4_jax.cute.utils").scalar_to_ssa
    number = import_module("cutlass").Float32

    def add(scores: Any, b: Any, head: Any, **others: Any) -> Any:
        row, group = (b[0] if axes.batch else 0), (head[0] if axes.heads else 0)
        bias = others["aux_tensors"][0][row, group, others["q_idx"][0], others["kv_idx"][0]]
        return scores + to_vector(number(bias), number)

    return add
