"""Find the marked attention calls of a traced program, and compute measures of each in it.

The program is evaluated from its jaxpr. A scan returns the measures of each of its steps, so the
layers of a stack keep their numbers; nothing is sent to the host while the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from maxattn.errors import InputError, Unsupported
from maxattn.jax_private.observed import (
    MarkedCall,
    auditing,
    call_p,
    operands_of,
    scan_counts,
    with_examples,
)

INLINED = (
    "jit",
    "closed_call",
    "eval_jaxpr",
    "checkpoint",
    "remat2",
    "custom_jvp_call",
    "custom_vjp_call",
)
Measure = Callable[[MarkedCall, Any, list[Any]], Any]
"""Function of a marked call, its operands (q, k, v, bias, mask), and q, k and v of all examples.

Of examples that `vmap` maps, the operands are the first's; as batch rows, q, k and v are of all. It
returns a tree of arrays.
"""


class CallPlace(NamedTuple):
    """A marked call in a program, and the lengths of the scans around it, outermost first."""

    call: MarkedCall
    lengths: tuple[int, ...] = ()


class Traced(NamedTuple):
    """A program that is traced for an audit, its inputs, and its marked calls in their order."""

    jaxpr: Any
    inputs: tuple[Any, ...]
    places: tuple[CallPlace, ...]

    def measured(self, measure: Measure, chosen: Sequence[np.ndarray]) -> Callable[..., Any]:
        """Return a function of `inputs` with results (the program's results, measures).

        `measure` computes what is returned of a call. `chosen` has for each place a bool for each
        of its calls, and other calls measure 0. Measures have a leading axis for each scan.
        """

        def run(*inputs: Any) -> tuple[list[Any], list[Any]]:
            walk = _Walk(measure, iter(chosen))
            return walk.run(self.jaxpr.jaxpr, self.jaxpr.consts, inputs, ())

        return run


def traced(f: Callable[..., Any], inputs: Sequence[Any], name: str) -> Traced:
    """Trace a function of trees of arrays for an audit, without running it."""
    with auditing(True):
        jaxpr = jax.make_jaxpr(f)(*inputs)
    places = tuple(_places(jaxpr.jaxpr, ()))
    if not places:
        rule = "an audit needs a call of maxattn's attention, and none is traced"
        remedy = "pass a function or a module that calls ma.attention or a module of maxattn"
        remedy += "; for other attention modules call ma.swap(model, config) first"
        raise InputError("audit", name, rule, remedy)
    return Traced(jaxpr, tuple(jax.tree.leaves(inputs)), places)


# ---- what is in a jaxpr --------------------------------------------------------------------------


def _inner(eqn: Any) -> list[Any]:
    """Return the jaxprs in the parameters of an equation; constants stay with a `ClosedJaxpr`."""
    found = []
    for value in eqn.params.values():
        each = value if isinstance(value, tuple | list) else (value,)
        found += [x for x in each if isinstance(x, Jaxpr | ClosedJaxpr)]
    return found


def _is_marked(eqn: Any) -> bool:
    inner = (each for x in _inner(eqn) for each in getattr(x, "jaxpr", x).eqns)
    return eqn.primitive is call_p or any(map(_is_marked, inner))


def _places(jaxpr: Any, lengths: tuple[int, ...]) -> Iterator[CallPlace]:
    for eqn in filter(_is_marked, jaxpr.eqns):
        if eqn.primitive is call_p:
            yield CallPlace(eqn.params["call"], lengths)
            continue
        name = eqn.primitive.name
        if name not in INLINED and name != "scan":
            rule = "an audit follows calls in jit, scan and remat"
            remedy = "audit the function inside it, such as one step of the model"
            raise Unsupported("audit", f"a call inside {name}", rule, remedy)
        inside = (*lengths, eqn.params["length"]) if name == "scan" else lengths
        for each in _inner(eqn):
            yield from _places(getattr(each, "jaxpr", each), inside)


# ---- evaluation ----------------------------------------------------------------------------------


class _Walk:
    """Evaluate jaxprs, and measure the marked calls."""

    def __init__(self, measure: Measure, chosen: Iterator[np.ndarray]) -> None:
        self.measure, self.chosen = measure, chosen

    def run(self, jaxpr: Any, consts: Any, args: Any, at: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """Return a jaxpr's results and measures; `at` has the steps of the scans around it."""
        env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        env |= zip(jaxpr.invars, args, strict=True)
        found: list[Any] = []

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqns, needed in _segments(jaxpr):
            if not _is_marked(eqns[0]):
                env |= _evaluated(jaxpr, eqns, needed, env)
                continue
            (eqn,), given = eqns, [read(x) for x in eqns[0].invars]
            with eqn.ctx.manager:
                outs, measures = self._marked(eqn, given, at)
            found += measures
            env |= zip(eqn.outvars, outs, strict=True)
        return [read(x) for x in jaxpr.outvars], found

    def _marked(self, eqn: Any, given: list[Any], at: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        if eqn.primitive is call_p:
            return given, [self._measured(eqn.params, given, at)]
        if eqn.primitive.name == "scan":
            return self._scan(eqn.params, given, at)
        (inner,) = _inner(eqn)
        return self.run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), given, at)

    def _measured(self, params: Any, given: list[Any], at: tuple[Any, ...]) -> Any:
        chosen, call = next(self.chosen), params["call"]

        def measure(given: list[Any]) -> Any:
            mapped = params["mapped"]
            return self.measure(
                call, operands_of(given, call, mapped), with_examples(given, mapped)
            )

        def zeros(given: list[Any]) -> Any:
            shapes = jax.eval_shape(measure, given)
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        if chosen.all() or not chosen.any():
            return measure(given) if chosen.all() else zeros(given)
        return jax.lax.cond(jnp.asarray(chosen)[at], measure, zeros, given)

    def _scan(self, params: Any, given: list[Any], at: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        (n, c), inner = scan_counts(params), params["jaxpr"]
        consts, carry, xs = given[:n], given[n : n + c], given[n + c :]

        def body(carry: Any, x: Any) -> Any:
            step, x = x
            outs, found = self.run(inner.jaxpr, inner.consts, (*consts, *carry, *x), (*at, step))
            return outs[:c], (outs[c:], found)

        numbers = jnp.arange(params["length"])
        how = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, (ys, found) = jax.lax.scan(body, carry, (numbers, xs), **how)
        return [*carry, *ys], found


def _segments(jaxpr: Any) -> list[tuple[list[Any], list[Any]]]:
    runs: list[list[Any]] = []
    for eqn in jaxpr.eqns:
        if runs and not _is_marked(eqn) and not _is_marked(runs[-1][-1]):
            runs[-1].append(eqn)
        else:
            runs.append([eqn])
    read = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
    found = []
    for run in reversed(runs):
        found.append((run, [x for eqn in run for x in eqn.outvars if x in read]))
        read |= {x for eqn in run for x in eqn.invars if not isinstance(x, Literal)}
    return found[::-1]


def _evaluated(jaxpr: Any, eqns: list[Any], needed: list[Any], env: dict[Any, Any]) -> Any:
    made = {x for eqn in eqns for x in eqn.outvars}
    read = (x for eqn in eqns for x in eqn.invars if not isinstance(x, Literal))
    free = [x for x in dict.fromkeys(read) if x not in made]
    part = jaxpr.replace(constvars=[], invars=free, outvars=needed, eqns=eqns)
    outs = jaxpr_as_fun(ClosedJaxpr(part, ()))(*(env[x] for x in free))
    return zip(needed, outs, strict=True)
