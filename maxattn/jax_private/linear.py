"""A call that is linear in some operands, with a transpose of its own.

jax derives forward mode from `compute` and reverse mode from `transposed`, such as a kernel's own
backward. If the other operands, the residuals, are differentiated too, jax differentiates the code
of `compute`. `jax.custom_derivatives.linear_call` (jax 0.12) has neither this nor `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def linear_call(
    compute: Callable[[Any, Any], Any],
    transposed: Callable[[Any, Any], Any],
    residuals: Any,
    operands: Any,
) -> Any:
    """Return `compute(residuals, operands)`, which is linear in the operands.

    Args:
        compute: (residuals, operands) -> results.
        transposed: (residuals, cotangents of the results) -> cotangents of the operands.
        residuals, operands: trees of arrays.
    """
    given, given_tree = jax.tree.flatten(residuals)
    moved, moved_tree = jax.tree.flatten(operands)
    out_tree = jax.tree.structure(jax.eval_shape(compute, residuals, operands))

    def flat(f: Callable[[Any, Any], Any], tree: Any) -> Callable[..., list[Any]]:
        def run(*args: Any) -> list[Any]:
            both = args[: len(given)], args[len(given) :]
            trees = given_tree, tree
            return jax.tree.leaves(f(*map(jax.tree.unflatten, trees, both)))

        return run

    functions = {"compute": flat(compute, moved_tree), "transposed": flat(transposed, out_tree)}
    results = linear_p.bind(*given, *moved, **functions, residuals=len(given))
    return jax.tree.unflatten(out_tree, results)


def forward_alone(compute: Callable[..., Any], refuse: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute` with forward mode by jax; its transpose calls `refuse`, which raises."""
    once = jax.custom_jvp(compute)

    def rule(primals: Any, tangents: Any) -> Any:
        leaves, tree = jax.tree.flatten(primals)
        dots = jax.tree.leaves(tangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
        moved = {i: x for i, x in enumerate(dots) if not isinstance(x, SymbolicZero)}

        def tangent(leaves: Any, moved: Any) -> Any:
            def of_moved(some: dict[int, Any]) -> Any:
                every = [some.get(i, x) for i, x in enumerate(leaves)]
                return compute(*jax.tree.unflatten(tree, every))

            return jax.jvp(of_moved, ({i: leaves[i] for i in moved},), (moved,))[1]

        # If the tangent is differentiated in turn, that too is possible in forward mode alone.
        again = forward_alone(tangent, refuse)
        return once(*primals), linear_call(again, refuse, leaves, moved)

    once.defjvp(rule, symbolic_zeros=True)
    return once


def _computed(*args: Any, compute: Callable[..., Any], **_: Any) -> list[Any]:
    return compute(*args)


def _avals(*avals: Any, compute: Callable[..., Any], **_: Any) -> Any:
    return jax.make_jaxpr(compute)(*avals).out_avals


def _jvp(primals: Any, tangents: Any, *, residuals: int, **functions: Any) -> Any:
    results = linear_p.bind(*primals, **functions, residuals=residuals)
    of_given, of_moved = tangents[:residuals], tangents[residuals:]
    if all(type(t) is ad.Zero for t in of_given):
        moved = map(ad.instantiate_zeros, of_moved)
        given = primals[:residuals]
        return results, linear_p.bind(*given, *moved, **functions, residuals=residuals)
    # Integers have no tangent.
    some = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_some(*leaves: Any) -> list[Any]:
        every = dict(enumerate(primals)) | dict(zip(some, leaves, strict=True))
        return functions["compute"](*every.values())

    primals_of_some, dots = ([x[i] for i in some] for x in (primals, tangents))
    return results, jax.jvp(of_some, primals_of_some, dots)[1]


def _transpose(
    cotangents: Sequence[Any], *args: Any, compute: Any, transposed: Any, residuals: int
) -> list[Any]:
    whole = map(ad.instantiate_zeros, cotangents)
    swapped = {"compute": transposed, "transposed": compute, "residuals": residuals}
    found = linear_p.bind(*args[:residuals], *whole, **swapped)
    unknown = map(ad.is_undefined_primal, args[residuals:])
    return [None] * residuals + [x if u else None for x, u in zip(found, unknown, strict=True)]


def _batch(
    args: Any, axes: Any, *, compute: Any, transposed: Any, residuals: int
) -> tuple[Any, Any]:
    size = next(x.shape[a] for x, a in zip(args, axes, strict=True) if a is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args[residuals:], axes[residuals:], strict=True)
    ]

    def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> list[Any]:
            of_rest = [0] * (len(args) - residuals)
            return jax.vmap(f, (*axes[:residuals], *of_rest), axis_size=size)(*args)

        return run

    functions = {"compute": mapped(compute), "transposed": mapped(transposed)}
    results = linear_p.bind(*args[:residuals], *moved, **functions, residuals=residuals)
    return results, [0] * len(results)


linear_p = Primitive("maxattn_linear")
linear_p.multiple_results = True
linear_p.def_impl(_computed)
linear_p.def_abstract_eval(_avals)
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_computed, multiple_results=True))
