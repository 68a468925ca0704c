"""Meshes, `shard_map` and tracers: names that are private, or that jax 0.10.2 to 0.12 change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax.sharding import AxisType, Mesh


def auto_mesh(devices: np.ndarray, axis_names: Sequence[str]) -> Mesh:
    """Make a mesh of Auto axes; newer jax makes Explicit axes by default."""
    return Mesh(devices, tuple(axis_names), axis_types=(AxisType.Auto,) * len(axis_names))


def with_auto_axes(mesh: Any) -> Any:
    """Return a mesh with its Explicit axes made Auto; return any other value unchanged."""
    if not isinstance(mesh, Mesh) or not axis_names_of_type(mesh, AxisType.Explicit):
        return mesh
    return auto_mesh(mesh.devices, mesh.axis_names)


def shard_map(
    f: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, axis_names: set[str]
) -> Callable[..., Any]:
    """Map `f` over shards without the check of varying axes, under which Pallas kernels raise."""
    return jax.shard_map(
        f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False
    )


def ambient_mesh() -> Any:
    """Return the mesh of the surrounding `shard_map`, `jax.set_mesh` or `with mesh:`, or None.

    jax has no public name for the mesh of a `with mesh:`. If jax moves the private name, that mesh
    is not found, and users can pass mesh=.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    if mesh is not None and not mesh.empty:
        return mesh
    try:
        from jax._src.mesh import thread_resources
    except ImportError:
        return None
    mesh = thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def axis_names_of_type(mesh: Any, kind: AxisType) -> frozenset[str]:
    """Return the axes of a mesh that have the given type: Auto, Explicit or Manual."""
    types = getattr(mesh, "axis_types", None) or ()
    return frozenset(name for name, t in zip(mesh.axis_names, types, strict=False) if t == kind)


def mapped_axes() -> frozenset[str]:
    """Return the Explicit mesh axes over which a surrounding `vmap` splits its mapped axis.

    jax has no public name for these axes. If jax moves the private name, no axis is returned.
    """
    try:
        from jax._src.core import get_axis_env
    except ImportError:
        return frozenset()
    return frozenset(getattr(get_axis_env(), "explicit_mesh_axis_names", ()))


def is_tracer(x: object) -> bool:
    """Check whether a value is traced, so that its numbers cannot be read."""
    return isinstance(x, jax.core.Tracer)
