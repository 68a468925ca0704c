"""A call that is linear in some operands, with a transpose of its own.

jax derives forward mode from `compute` and reverse mode from `transposed`, such as a kernel's own
backward. If the other operands, the residuals, are differentiated too, jax differentiates the code
of `compute`. `jax.custom_derivatives.linear_call` (jax 0.12) has neither this nor `vmap`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.core import unmapped_aval
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def linear_call(
    compute: Callable[[Any, Any], Any],
    transposed: Callable[[Any, Any], Any],
    residuals: Any,
    operands: Any,
    like: Any,
) -> Any:
    """Return `compute(residuals, operands)`, which is linear in the operands.

    `transposed` maps residuals and cotangents of the results to cotangents of the operands. Neither
    function is traced before its mode is used. Residuals and operands are trees of arrays; `like`
    is a tree of arrays with the shapes and dtypes of the results.
    """
    given, given_tree = jax.tree.flatten(residuals)
    moved, moved_tree = jax.tree.flatten(operands)
    results, out_tree = jax.tree.flatten(like)

    def flat(f: Callable[[Any, Any], Any], tree: Any) -> Callable[..., list[Any]]:
        def run(*args: Any) -> list[Any]:
            both = args[: len(given)], args[len(given) :]
            trees = given_tree, tree
            return jax.tree.leaves(f(*map(jax.tree.unflatten, trees, both)))

        return run

    types = tuple(map(jax.typeof, results))
    of = Parameters(flat(compute, moved_tree), flat(transposed, out_tree), len(given), types)
    return jax.tree.unflatten(out_tree, linear_p.bind(*given, *moved, of=of))


def forward_alone(compute: Callable[..., Any], refuse: Callable[..., Any]) -> Callable[..., Any]:
    """Return `compute` with forward mode by jax; its transpose calls `refuse`, which raises."""
    once = jax.custom_jvp(compute)

    def rule(primals: Any, tangents: Any) -> Any:
        leaves, tree = jax.tree.flatten(primals)
        dots = jax.tree.leaves(tangents, is_leaf=lambda x: isinstance(x, SymbolicZero))
        moved = {i: x for i, x in enumerate(dots) if is_array(x)}

        def tangent(leaves: Any, moved: Any) -> Any:
            def of_moved(some: dict[int, Any]) -> Any:
                every = [some.get(i, x) for i, x in enumerate(leaves)]
                return compute(*jax.tree.unflatten(tree, every))

            return jax.jvp(of_moved, ({i: leaves[i] for i in moved},), (moved,))[1]

        # If the tangent is differentiated in turn, that too is possible in forward mode alone.
        again = forward_alone(tangent, refuse)
        results = once(*primals)
        return results, linear_call(again, refuse, leaves, moved, results)

    once.defjvp(rule, symbolic_zeros=True)
    return once


def is_array(tangent: Any) -> bool:
    """Check whether a tangent is an array, and no symbolic zero or None."""
    return tangent is not None and not isinstance(tangent, SymbolicZero)


class Parameters(NamedTuple):
    """The parameters of a linear call, whose arguments are residuals, then operands."""

    # compute, transposed: (residuals, operands or cotangents) -> list of arrays
    compute: Callable[..., list[Any]]
    transposed: Callable[..., list[Any]]
    residuals: int  # their number
    results: tuple[Any, ...]  # the types of the results


def _jvp(primals: Any, tangents: Any, *, of: Parameters) -> Any:
    results, n = linear_p.bind(*primals, of=of), of.residuals
    if all(type(t) is ad.Zero for t in tangents[:n]):
        moved = map(ad.instantiate_zeros, tangents[n:])
        return results, linear_p.bind(*primals[:n], *moved, of=of)
    # Integers have no tangent.
    some = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_some(*leaves: Any) -> list[Any]:
        every = dict(enumerate(primals)) | dict(zip(some, leaves, strict=True))
        return of.compute(*every.values())

    primals_of_some, dots = ([x[i] for i in some] for x in (primals, tangents))
    return results, jax.jvp(of_some, primals_of_some, dots)[1]


def _transpose(cotangents: Sequence[Any], *args: Any, of: Parameters) -> list[Any]:
    n, whole = of.residuals, map(ad.instantiate_zeros, cotangents)
    found = of.transposed(*args[:n], *whole)
    unknown = map(ad.is_undefined_primal, args[n:])
    return [None] * n + [x if u else None for x, u in zip(found, unknown, strict=True)]


def _batch(args: Any, axes: Any, *, of: Parameters) -> tuple[Any, Any]:
    """Map every operand and every result, even if it is equal for all examples."""
    n = of.residuals
    size = next(x.shape[a] for x, a in zip(args, axes, strict=True) if a is not None)
    moved = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args[n:], axes[n:], strict=True)
    ]

    def mapped(f: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> list[Any]:
            of_rest = [0] * (len(args) - n)
            return jax.vmap(f, (*axes[:n], *of_rest), axis_size=size)(*args)

        return run

    types = tuple(unmapped_aval(size, 0, x) for x in of.results)
    whole = Parameters(mapped(of.compute), mapped(of.transposed), n, types)
    results = linear_p.bind(*args[:n], *moved, of=whole)
    return results, [0] * len(results)


def _computed(*args: Any, of: Parameters) -> list[Any]:
    return of.compute(*args)


linear_p = Primitive("maxattn_linear")
linear_p.multiple_results = True
linear_p.def_impl(_computed)
linear_p.def_abstract_eval(lambda *_, of: list(of.results))
ad.primitive_jvps[linear_p] = _jvp
ad.primitive_transposes[linear_p] = _transpose
batching.primitive_batchers[linear_p] = _batch
mlir.register_lowering(linear_p, mlir.lower_fun(_computed, multiple_results=True))
