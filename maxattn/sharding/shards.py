"""How arrays are split over a mesh: partition specs from letters, and the `shard_map` helper.

Letters name array axes: B batch, T queries, S keys, N and K heads, H channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from maxattn.jax_private.mesh import ambient_mesh, axis_names_of_type, mapped_axes, shard_map
from maxattn.jax_private.varying import vary_over, varying_axes
from maxattn.sharding.axes import LETTERS
from maxattn.sharding.mesh import MeshShape, surrounding_manual_axes

Spec = tuple[tuple[str, ...] | None, ...]


def spec_of(letters: str, shape: MeshShape) -> Spec:
    """Return the mesh axes that split each axis of an array, named by letters such as "BTNH"."""
    present = dict(shape)
    axes = (tuple(a for a in LETTERS.get(letter, ()) if a in present) for letter in letters)
    return tuple(a or None for a in axes)


def ways(letter: str, shape: MeshShape) -> int:
    """Return the number of shards into which a mesh splits the array axis of a letter."""
    sizes = dict(shape)
    return prod(sizes.get(a, 1) for a in LETTERS.get(letter, ()))


def partition_spec(letters: str, shape: MeshShape) -> PartitionSpec:
    """Return `spec_of` as a `PartitionSpec`."""
    return PartitionSpec(*spec_of(letters, shape))


class Layout(NamedTuple):
    """A mesh, the axes over which attention is split, and the padded lengths T and S.

    `shape` excludes axes of a surrounding `shard_map`; if it is empty, the mesh may be None.
    """

    mesh: Any
    shape: MeshShape
    lengths: Mapping[str, int]


def on_shards(
    f: Callable[..., Any],
    layout: Layout,
    operands: Any,
    letters: Any,
    in_specs: Any,
    out_specs: Any,
) -> Any:
    """Run `f` on each device's zero-padded shards; `letters` names the axes of each operand."""

    def pad(x: jax.Array, letters: str) -> jax.Array:
        for axis, letter in enumerate(letters):
            x = pad_axis(x, axis, layout.lengths.get(letter, 0))
        return x

    padded = jax.tree.map(pad, operands, letters)
    results = over_shards(f, layout.mesh, layout.shape, in_specs, out_specs)(*padded)
    # This shard_map does not track varying axes, so results lose those of a surrounding shard_map.
    return vary_over(results, varying_axes(operands))


def over_shards(
    f: Callable[..., Any], mesh: Any, shape: MeshShape, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Return `f` mapped over the shards of the axes in `shape`; without axes, return `f`."""
    ambient = ambient_mesh()
    if not shape and not surrounding_manual_axes():
        return f
    mesh = mesh if ambient is None else ambient
    # Axes that attention does not use become manual too: jax refuses a TPU kernel while any axis is
    # Auto.
    names = ({a for a, _ in shape} | axis_names_of_type(mesh, AxisType.Auto)) - mapped_axes()
    return shard_map(f, mesh, in_specs, out_specs, names) if names else f


def axis_offset(axis: str, shape: MeshShape, local_length: int) -> Any:
    """Return the position of this device's first token if `axis` splits the sequence, else 0."""
    return jax.lax.axis_index(axis) * local_length if axis in dict(shape) else 0


def sum_over(x: jax.Array, axes: Sequence[str], shape: MeshShape) -> jax.Array:
    """Sum x over the devices of every axis in `axes` that the mesh has."""
    present = tuple(a for a in axes if a in dict(shape))
    return jax.lax.psum(x, present) if present else x


def pad_axis(x: jax.Array, axis: int, size: int, fill: float = 0.0) -> jax.Array:
    """Pad the end of one axis with `fill` up to length `size`."""
    extra = size - x.shape[axis]
    widths = [(0, extra if i == axis else 0) for i in range(x.ndim)]
    return x if extra <= 0 else jnp.pad(x, widths, constant_values=fill)
