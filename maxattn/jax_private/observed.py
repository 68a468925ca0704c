"""Marks on attention calls in programs that are traced for an audit; other programs have none.

`jit` keeps separate traces for both values of `auditing`, so that an audit neither uses nor changes
the traces of a model's own steps. A mark is a primitive that returns its operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from maxattn.jax_private.mesh import is_tracer
from maxattn.jax_private.vmapped import identity

Mapped = tuple[tuple[bool, ...], ...]
"""Of each operand of a mark: whether each `vmap` around it maps it, outermost first."""
auditing = jax.make_user_context(False)
"""Whether programs are traced for an audit. It is made at import: a new context ends all traces."""


@dataclass(frozen=True, eq=False)
class MarkedCall:
    """The facts of a marked call while it is traced."""

    plan: Any
    config: Any
    mesh: Any
    name: str  # name of the module that calls, or ""
    rotary: Any  # the rotary table of the queries, if its numbers are known; else None
    structure: Any  # structure of the marked operands (q, k, v, bias, mask)


_layer: ContextVar[str] = ContextVar("maxattn.layer", default="")


@contextmanager
def layer_named(layer: Any) -> Iterator[None]:
    """Name the calls of functions in a layer, which have no module's name, by the layer's path."""
    token = _layer.set(getattr(layer, "audit_name", ""))
    try:
        yield
    finally:
        _layer.reset(token)


def marked(operands: Any, plan: Any, config: Any, mesh: Any, name: str, rotary: Any) -> Any:
    """Return a call's operands; while a program is traced for an audit, with a mark on them."""
    if not auditing.value:
        return operands
    leaves, structure = jax.tree.flatten(operands)
    is_known = not any(map(is_tracer, jax.tree.leaves(rotary)))
    name = name or _layer.get()
    call = MarkedCall(plan, config, mesh, name, rotary if is_known else None, structure)
    leaves = call_p.bind(*map(jnp.asarray, leaves), call=call, mapped=((),) * len(leaves))
    return jax.tree.unflatten(structure, leaves)


def operands_of(leaves: Any, call: MarkedCall, mapped: Mapped) -> Any:
    """Return (q, k, v, bias, mask) of a mark; of examples that `vmap` maps, the first."""
    first = [x[(0,) * sum(own)] if any(own) else x for x, own in zip(leaves, mapped, strict=True)]
    return jax.tree.unflatten(call.structure, first)


def with_examples(leaves: Any, mapped: Mapped) -> list[Any]:
    """Return q, k and v of a mark; examples that `vmap` maps are batch rows."""
    levels = len(mapped[0])
    if not levels:
        return list(leaves[:3])
    spread = [
        jnp.expand_dims(x, [i for i, is_mapped in enumerate(own) if not is_mapped])
        for x, own in zip(leaves, mapped, strict=True)
    ]
    examples = jnp.broadcast_shapes(*(x.shape[:levels] for x in spread))
    return [
        jnp.broadcast_to(x, (*examples, *x.shape[levels:])).reshape(-1, *x.shape[levels + 1 :])
        for x in spread[:3]
    ]


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many operands of a scan are constants and how many are its carry.

    jax 0.10 has the numbers in the scan's parameters; later versions have the operands' tree.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _batch(args: Any, axes: Any, *, call: MarkedCall, mapped: Mapped) -> Any:
    pairs = list(zip(args, axes, strict=True))
    moved = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in pairs]
    levels = tuple((axis is not None, *own) for own, axis in zip(mapped, axes, strict=True))
    return call_p.bind(*moved, call=call, mapped=levels), [axis and 0 for axis in axes]


call_p = identity("attention_call", _batch)
ad.primitive_jvps[call_p] = lambda args, tangents, **how: (call_p.bind(*args, **how), tangents)
