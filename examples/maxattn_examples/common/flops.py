"""Count the operations of a forward pass: products, convolutions and attention, from shapes.

One multiplication and one addition are two operations. What is recomputed in a backward is not
counted, so that a utilisation says what a user gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

BACKWARD = {"attention": 2.5, "matmul": 2.0}  # of the forward


@dataclass(frozen=True)
class Work:
    """The operations of one forward pass."""

    attention: int = 0
    matmul: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.attention + other.attention, self.matmul + other.matmul)

    def total(self, training: bool, frozen: bool = False) -> float:
        """Add both up.

        Args:
            training: whether a backward follows.
            frozen: whether the matrices of products learn nothing, so that a backward of theirs is
                one product, not two.
        """
        factors = BACKWARD | ({"matmul": 1.0} if frozen else {})
        more = {kind: 1.0 + (factor if training else 0.0) for kind, factor in factors.items()}
        return self.attention * more["attention"] + self.matmul * more["matmul"]


def count(f: Callable[..., Any], *shapes: Any) -> Work:
    """Count the operations of a function of arrays.

    Args:
        f: what to trace.
        shapes: its arguments, `jax.ShapeDtypeStruct`s will do.
    """
    return _of(jax.make_jaxpr(f)(*shapes).jaxpr)


def _of(jaxpr: Any) -> Work:
    return sum((_equation(eqn) for eqn in jaxpr.eqns), Work())


def _equation(eqn: Any) -> Work:
    name = eqn.primitive.name
    if eqn.params.get("name") == "_run" and [v.aval.ndim for v in eqn.invars[:3]] == [4, 4, 4]:
        # maxattn's own jit around every attention: q [B, T, N, H], k [B, S, K, H], v [B, S, K, V].
        (b, t, n, h), (_, s, _, v) = (eqn.invars[i].aval.shape for i in (0, 2))
        return Work(attention=2 * b * n * t * s * (h + v))
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        length = math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
        return Work(matmul=2 * eqn.outvars[0].aval.size * length)
    if name == "conv_general_dilated":
        out = eqn.outvars[0].aval
        channels = out.shape[eqn.params["dimension_numbers"].out_spec[1]]
        return Work(matmul=2 * out.size * (eqn.invars[1].aval.size // channels))
    times = eqn.params["length"] if name == "scan" else 1
    inner = sum((_of(each) for value in eqn.params.values() for each in _jaxprs(value)), Work())
    return Work(times * inner.attention, times * inner.matmul)


def _jaxprs(value: Any) -> list[Any]:
    """Find the jaxprs in a parameter of an equation."""
    if isinstance(value, list | tuple):
        return [found for each in value for found in _jaxprs(each)]
    inner = getattr(value, "jaxpr", value)
    return [inner] if hasattr(inner, "eqns") else []
