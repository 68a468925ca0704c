"""Arrays that `vmap` maps over one example or more: a foreign kernel has no grid of none."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from maxattn.errors import InputError


def some_examples(kernel: str, operands: Any) -> Any:
    """Return the operands of a kernel, an array or a tree of them. Nothing is computed.

    Raises:
        InputError: under `vmap` over no example.
    """
    leaves, structure = jax.tree.flatten(operands)
    return jax.tree.unflatten(structure, some_p.bind(*leaves, kernel=kernel))


def _batch(args: Any, axes: Any, *, kernel: str) -> Any:
    if any(axis is not None and x.shape[axis] == 0 for x, axis in zip(args, axes, strict=True)):
        rule = f"{kernel} runs on one example or more"
        remedy = "skip the call when there is nothing to attend, or set attention: dot_product"
        raise InputError("vmap", "an axis of size 0", rule, remedy)
    return some_p.bind(*args, kernel=kernel), axes


some_p = Primitive("some_examples")
some_p.multiple_results = True
some_p.def_impl(lambda *args, kernel: list(args))
some_p.def_abstract_eval(lambda *args, kernel: list(args))
mlir.register_lowering(some_p, lambda _, *args, kernel: list(args))
batching.primitive_batchers[some_p] = _batch
