"""Arrays that `vmap` maps together, or not at all.

Where `vmap` maps one result of a `jax.custom_vjp` and not another, jax (0.11) hands each example
the sum of the gradients of the other, and adds the examples' results up: the gradient of what they
share is too large by their number.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def batched_alike(*arrays: Any) -> tuple[Any, ...]:
    """Return the arrays; under `vmap` all of them are mapped where one is. Nothing is computed."""
    return tuple(alike_p.bind(*arrays))


def _batch(args: Any, axes: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    mapped = [_first(x, axis, size) for x, axis in zip(args, axes, strict=True)]
    return alike_p.bind(*mapped), [0] * len(mapped)


def _first(x: Any, axis: int | None, size: int) -> Any:
    """Put the mapped axis first, or give every example its own."""
    return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)


alike_p = Primitive("batched_alike")
alike_p.multiple_results = True
alike_p.def_impl(lambda *args: list(args))
alike_p.def_abstract_eval(lambda *args: list(args))
mlir.register_lowering(alike_p, lambda _, *args: list(args))
batching.primitive_batchers[alike_p] = _batch
ad.deflinear2(alike_p, lambda cotangents, *_: list(cotangents))
