"""Explicit mesh axes: the types of arrays have their sharding, and every operation needs one.

Attention shards its operands itself. It runs with such axes made Auto, and its results are split
over the Explicit ones again as its operands are.
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
    """Return the surrounding or the operands' mesh with Explicit axes, or None.

    For traced operands it is an `AbstractMesh`.
    """
    arrays = (x for x in jax.tree.leaves(operands) if isinstance(x, jax.Array))
    meshes = (jax.sharding.get_abstract_mesh(), *(jax.typeof(x).sharding.mesh for x in arrays))
    return next((mesh for mesh in meshes if axis_names_of_type(mesh, AxisType.Explicit)), None)


def program_mesh(mesh: Any = None) -> Any:
    """Return a mesh, by default that of a surrounding `jax.set_mesh`, with Auto axes; or None."""
    around = jax.sharding.get_mesh()
    return with_auto_axes(around if mesh is None and not around.empty else mesh)


@contextmanager
def inside_auto_axes() -> Iterator[None]:
    """Make Explicit axes of a surrounding `jax.set_mesh` Auto inside a `with`; not under `jit`.

    The operations of a program inside need no shardings.
    """
    around = jax.sharding.get_mesh()
    with jax.set_mesh(with_auto_axes(around)) if explicit_mesh() is not None else nullcontext():
        yield


def spec_of_type(x: Any) -> PartitionSpec:
    """Return the Explicit axes that an array is split over: an entry for each of its axes."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return PartitionSpec(*spec, *(None,) * (x.ndim - len(spec)))


def over_auto_axes(f: Callable[..., Any], mesh: Any, out_specs: Any) -> Callable[..., Any]:
    """Return `f` with the Explicit axes of a mesh made Auto inside, and its results split again.

    The mesh is from `explicit_mesh`; for None it returns `f` itself.
    """
    if mesh is None:
        return f
    axes = tuple(sorted(axis_names_of_type(mesh, AxisType.Explicit)))
    shardings = jax.tree.map(partial(NamedSharding, mesh), out_specs)
    return jax.sharding.auto_axes(f, axes=axes, out_sharding=shardings)


def check_layouts(operands: dict[str, Any], letters: dict[str, str]) -> None:
    """Refuse operands that are split over other Explicit axes than attention splits them over."""
    for name, x in operands.items():
        for axis, (letter, entry) in enumerate(zip(letters[name], spec_of_type(x), strict=True)):
            over = (entry,) if isinstance(entry, str) else tuple(entry or ())
            other = [str(a) for a in over if a not in LETTERS.get(letter, ())]
            if not other:
                continue
            there = jax.typeof(x).sharding.mesh.axis_names
            fits = [tuple(a for a in LETTERS.get(c, ()) if a in there) for c in letters[name]]
            allowed = f"over {', '.join(fits[axis])} alone" if fits[axis] else "over no axis"
            rule = f"attention splits its axis {letter} ({axis}) {allowed}: its plan has every send"
            spec = ", ".join(repr(a[0] if len(a) == 1 else a or None) for a in fits)
            remedy = f"call it with jax.sharding.reshard({name}, jax.P({spec}))"
            raise MeshError(name, f"{letter} over {', '.join(other)}", rule, remedy)
