"""Explicit mesh axes: an array's type has its sharding, and each operation must choose one.

Attention shards its operands itself. So attention runs with Explicit axes made Auto, and gives its
results the sharding of its operands over the Explicit axes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from maxattn.errors import MeshError
from maxattn.jax_private.mesh import axis_names_of_type, with_auto_axes
from maxattn.sharding.axes import LETTERS


def explicit_mesh(*operands: Any) -> Any:
    """Return the surrounding mesh with Explicit axes, else an operand's (abstract if traced)."""
    arrays = (x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array))
    meshes = (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays))
    return next((mesh for mesh in meshes if axis_names_of_type(mesh, AxisType.Explicit)), None)


def program_mesh(mesh: Any = None) -> Any:
    """Return `mesh`, or without one the mesh of `jax.set_mesh` or None, with all axes Auto."""
    around = jax.sharding.get_mesh()
    return with_auto_axes(around if mesh is None and not around.empty else mesh)


@contextmanager
def inside_auto_axes() -> Iterator[None]:
    """Make Explicit axes of a surrounding `jax.set_mesh` Auto in a `with` outside `jit`."""
    around = jax.sharding.get_mesh()
    with jax.set_mesh(with_auto_axes(around)) if explicit_mesh() is not None else nullcontext():
        yield


def spec_of_type(x: Any) -> PartitionSpec:
    """Return the spec of an array's Explicit mesh axes, with one entry per array axis."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))


def over_auto_axes(f: Callable[..., Any], mesh: Any, out_specs: Any) -> Callable[..., Any]:
    """Wrap `f`: a mesh's Explicit axes are made Auto in it, and `out_specs` split its results."""
    if mesh is None:
        return f
    axes = tuple(sorted(axis_names_of_type(mesh, AxisType.Explicit)))
    shardings = jax.tree.map(partial(NamedSharding, mesh), out_specs)
    return jax.sharding.auto_axes(f, axes=axes, out_sharding=shardings)


def check_layouts(operands: dict[str, Any], letters: dict[str, str]) -> None:
    """Refuse operands whose Explicit sharding differs from the way attention splits them."""
    for name, x in operands.items():
        for axis, (letter, entry) in enumerate(zip(letters[name], spec_of_type(x), strict=True)):
            over = (entry,) if isinstance(entry, str) else tuple(entry or ())
            other = [str(a) for a in over if a not in LETTERS.get(letter, ())]
            if not other:
                continue
            there = jax.typeof(x).sharding.mesh.axis_names
            fits = [tuple(a for a in LETTERS.get(c, ()) if a in there) for c in letters[name]]
            where = f"over {', '.join(fits[axis])} alone" if fits[axis] else "over no axis"
            rule = f"attention splits axis {letter} ({axis}) {where}; other layouts need transfers"
            spec = ", ".join(repr(a[0] if len(a) == 1 else a or None) for a in fits)
            remedy = f"pass jax.sharding.reshard({name}, jax.P({spec}))"
            raise MeshError(name, f"{letter} over {', '.join(other)}", rule, remedy)
