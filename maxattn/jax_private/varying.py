"""The mesh axes that values vary over, in a user's `shard_map` with check_vma=True."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")


def varying_axes(tree: Any) -> frozenset[str]:
    """Return the mesh axes over which any array of a tree varies; none outside of `shard_map`."""
    axes = (jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree))
    return frozenset[str]().union(*axes)


def vary_over(tree: Tree, axes: frozenset[str]) -> Tree:
    """Let each array vary over all `axes`; jax then sums its gradient over the added axes."""

    def one(x: Any) -> Any:
        more = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, more, to="varying") if more else x

    return jax.tree.map(one, tree) if axes else tree


def vary_alike(tree: Tree) -> Tree:
    """Let every array of a tree vary over all axes that any array of the tree varies over."""
    return vary_over(tree, varying_axes(tree))


def checked_axes(names: Iterable[str]) -> frozenset[str]:
    """Return the manual axes among `names` that a surrounding `shard_map` checks."""
    return varying_axes([jax.lax.axis_index(name) for name in names])
