"""Primitives that return their operands, and act under `vmap` or in compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from maxattn.errors import InputError


def batched_alike(*arrays: Any) -> tuple[Any, ...]:
    """Return the arrays; under `vmap`, map all of them if any one is mapped.

    Every result of a linear call (linear.py) is mapped if any is, and the results that it is the
    tangent of must be mapped alike.
    """
    return tuple(alike_p.bind(*arrays))


def some_examples(kernel: str, operands: Any) -> Any:
    """Return a tree of operands; refuse a `vmap` over 0 examples, for which no grid exists."""
    leaves, structure = jax.tree.flatten(operands)
    return jax.tree.unflatten(structure, some_p.bind(*leaves, kernel=kernel))


def identity(name: str, batch: Any, met: Callable[..., Any] = lambda **_: None) -> Primitive:
    """Make a primitive that returns its operands; evaluating or compiling it calls `met`."""

    def returned(*args: Any, **parameters: Any) -> list[Any]:
        met(**parameters)
        return list(args)

    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(returned)
    made.def_abstract_eval(lambda *args, **_: list(args))
    mlir.register_lowering(made, lambda _, *args, **parameters: returned(*args, **parameters))
    batching.primitive_batchers[made] = batch
    return made


def _batch_alike(args: Any, axes: Any) -> Any:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    mapped = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args, axes, strict=True)
    ]
    return alike_p.bind(*mapped), [0] * len(mapped)


def _batch_some(args: Any, axes: Any, *, kernel: str) -> Any:
    if any(axis is not None and x.shape[axis] == 0 for x, axis in zip(args, axes, strict=True)):
        rule = f"{kernel} needs at least one example"
        remedy = "skip the call if there are no examples, or set attention: dot_product"
        raise InputError("vmap", "an axis of size 0", rule, remedy)
    return some_p.bind(*args, kernel=kernel), axes


alike_p, some_p = identity("batched_alike", _batch_alike), identity("some_examples", _batch_some)
ad.deflinear2(alike_p, lambda cotangents, *_: list(cotangents))
