"""Search the operations of a traced program."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """Yield every equation of a jaxpr and of nested ones, as often as they are called."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(
            eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def of_primitive(jaxpr: Any, name: str) -> list[Any]:
    """List the equations of one primitive; of `all_to_all` also those within groups."""
    names = {name, f"{name}_in_groups"}
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name in names]


def count_primitive(jaxpr: Any, name: str) -> int:
    """Count the equations of one primitive."""
    return len(of_primitive(jaxpr, name))
