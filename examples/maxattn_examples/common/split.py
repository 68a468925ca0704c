"""A model as its structure and a tuple of arrays, which a compiled program takes in no time.

jax takes a tuple apart in C++. The states of nnx it takes apart in Python: of a model with a
thousand arrays that is milliseconds before every call, in which a GPU may have nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Structure:
    """All of a model but its arrays; models of equal structures share compiled programs.

    Args:
        graph: of the modules.
        tree: of the variables.
    """

    graph: nnx.GraphDef[Any]
    tree: Any

    def merge(self, leaves: Sequence[Any]) -> Any:
        """Return a model of these arrays.

        Args:
            leaves: in the order of `split`.
        """
        return nnx.merge(self.graph, self.tree.unflatten(leaves))


def split(model: nnx.Module) -> tuple[Structure, Leaves]:
    """Return a model's structure and its arrays, or their shapes where it has no more."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return Structure(graph, tree), tuple(leaves)
