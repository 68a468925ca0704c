"""Choose the mesh of a call, refuse meshes that do not fit, and make the mesh of a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from maxattn.errors import MeshError, brief, did_you_mean
from maxattn.jax_private.mesh import (
    ambient_mesh,
    auto_mesh,
    axis_names_of_type,
    is_tracer,
    mapped_axes,
    with_auto_axes,
)
from maxattn.jax_private.varying import checked_axes
from maxattn.sharding.axes import AXES
from maxattn.sharding.explicit import explicit_mesh

MOST_DEVICES = 2**16
"""The most devices of a mesh: six times the largest machine, so that plans take only seconds."""
MOST_RANKS = 2**12
"""The most devices on the context axis: planning a ring looks at every pair of devices."""

MeshShape = tuple[tuple[str, int], ...]


def mesh_shape(mesh: Any) -> MeshShape:
    """Return the (axis, size) pairs of a mesh, of a mapping such as {"context": 4}, or of None.

    A mesh of several devices must have one of attention's axes.
    """
    if mesh is None or mesh is False:
        return ()
    if isinstance(mesh, Mapping):
        for axis, size in mesh.items():
            if axis not in AXES:
                rule = f"a mesh axis must be one of {', '.join(AXES)}"
                raise MeshError("mesh", axis, rule, did_you_mean(axis, AXES) or "rename the axis")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                rule = "the size of an axis must be a whole number of devices, at least 1"
                raise MeshError("mesh", f"{axis}={brief(size)}", rule, "give it a positive size")
        _check_count(mesh)
        return tuple((a, int(mesh[a])) for a in AXES if mesh.get(a, 1) > 1)
    check_mesh(mesh)
    sizes = _left(mesh)
    _check_count({a: sizes[a] for a in AXES if a in sizes})
    return tuple((a, sizes[a]) for a in AXES if a in sizes)


def _left(mesh: Any) -> dict[str, int]:
    """Return the sizes of a mesh's axes above size 1 that no outer `shard_map` or `vmap` uses."""
    taken = axis_names_of_type(mesh, AxisType.Manual) | surrounding_manual_axes() | mapped_axes()
    return {a: s for a, s in mesh.shape.items() if s > 1 and a not in taken}


def check_names(mesh: Any) -> None:
    """Refuse mesh axes over which attention is not split: their devices would repeat work."""
    if not isinstance(mesh, Mesh | AbstractMesh):
        return
    sizes = _left(mesh)
    if others := {a: s for a, s in sizes.items() if a not in AXES}:
        found = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
        names, times = ", ".join(others), prod(others.values())
        known = f"attention is split over {', '.join(AXES)}"
        rule = f"{known}, and each of the {times} devices of {names} would compute the same"
        ours = f"rename {names} to tensor to split heads, or to context to split tokens"
        remedy = f"{ours}; or pass mesh=False, which leaves the layout to the compiler"
        raise MeshError("mesh", found, rule, remedy)


def _check_count(sizes: Mapping[str, int]) -> None:
    count, ranks = prod(sizes.values()), sizes.get("context", 1)
    if count <= MOST_DEVICES and ranks <= MOST_RANKS:
        return
    found = ", ".join(f"{axis}={brief(size)}" for axis, size in sizes.items())
    rule = f"a mesh has at most {MOST_DEVICES} devices, and {MOST_RANKS} on context"
    raise MeshError("mesh", found, rule, "set the sizes of the mesh on which the job runs")


def check_mesh(mesh: Any) -> None:
    """Refuse a value that is no mesh, None or False, and meshes without attention's axes."""
    if mesh is None or mesh is False:
        return
    if not isinstance(mesh, Mesh | AbstractMesh):
        found = repr(mesh) if isinstance(mesh, str) else type(mesh).__name__
        rule = "it must be a jax.sharding.Mesh, or for a plan a mapping such as {'context': 4}"
        raise MeshError("mesh", found, rule, "make one with config.make_mesh()")
    if mesh.size > 1 and not set(AXES) & set(mesh.axis_names):
        found = f"axes {', '.join(map(str, mesh.axis_names))}"
        rule = f"attention is split over {', '.join(AXES)}"
        raise MeshError("mesh", found, rule, "rename the axes to some of these, or pass no mesh")


def surrounding_manual_axes() -> frozenset[str]:
    """Return the mesh axes that are manual in a surrounding `shard_map`."""
    ambient = ambient_mesh()
    return frozenset() if ambient is None else axis_names_of_type(ambient, AxisType.Manual)


def usable_mesh(mesh: Any, operand: Any = None) -> Any:
    """Return `mesh` (False: none), else the surrounding mesh, else the mesh of q's type."""
    if mesh is False:
        return None
    around = ambient_mesh()
    if mesh is None:
        ambient = explicit_mesh(operand) if around is None else around
        named = ambient is not None and bool(set(AXES) & set(ambient.axis_names))
        check_names(ambient if named else None)
        return ambient if named else None
    if isinstance(mesh, Mapping):
        rule = "attention needs a mesh of devices; only plan() takes a mapping of sizes"
        raise MeshError("mesh", mesh, rule, "pass config.make_mesh()")
    if around is not None and mesh_shape(mesh) and dict(around.shape) != dict(mesh.shape):
        rule = f"mesh= must be the same as the surrounding mesh, {dict(around.shape)}"
        remedy = "leave out mesh=, or call outside of the surrounding mesh"
        raise MeshError("mesh", dict(mesh.shape), rule, remedy)
    check_names(mesh)
    return with_auto_axes(mesh)


def check_devices(mesh: Any, q: Any) -> None:
    """Refuse a mesh whose devices differ from q's, or an `AbstractMesh` if q is on no mesh."""
    if not mesh_shape(mesh):
        return
    if ambient_mesh() is None and isinstance(mesh, AbstractMesh):
        if is_tracer(q) and not jax.typeof(q).sharding.mesh.empty:
            return
        rule, remedy = "it has sizes but no devices", "pass a Mesh; only plan() needs no devices"
        raise MeshError("mesh", "AbstractMesh", rule, remedy)
    if is_tracer(q):
        return
    committed = isinstance(mesh, Mesh) and getattr(q, "committed", False)
    if committed and q.sharding.device_set != set(mesh.devices.flat):
        rule = "q must be on the devices of the mesh, and is on others"
        example = "jax.device_put(q, NamedSharding(mesh, PartitionSpec()))"
        remedy = f"put the arrays on the mesh, e.g. with {example}"
        raise MeshError("mesh", dict(mesh.shape), rule, remedy)


def check_unchecked(kernel: str) -> None:
    """Refuse a Pallas kernel in a `shard_map` that checks varying axes, where jax would raise."""
    ambient = ambient_mesh()
    manual = surrounding_manual_axes()
    if ambient is None or manual != set(ambient.axis_names) or not checked_axes(manual):
        return
    over = f"over its axes, {', '.join(sorted(manual))}"
    rule = f"{kernel} is a Pallas kernel, and this shard_map checks which values vary {over}"
    remedy = "pass check_vma=False to jax.shard_map, or set attention: dot_product"
    raise MeshError("check_vma", True, rule, remedy)


# ---- making a mesh -------------------------------------------------------------------------------


def make_mesh(
    parallelism: Mapping[str, tuple[int, int]], devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """Make the mesh of a config: `ici_*` sizes within a slice, `dcn_*` sizes between slices.

    Args:
        parallelism: (devices of a slice, slices) by axis, outermost first, as
            `AttentionConfig.axis_parallelism` returns it. One axis may have -1 devices, and one -1
            slices: -1 means all that remain.
        devices: the devices; default all of `jax.devices()`.

    Raises:
        MeshError: the product of the sizes is not the number of devices.
    """
    from jax.experimental import mesh_utils

    devices = list(jax.devices() if devices is None else devices)
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    axes = tuple(parallelism)
    ici = _fill([ici for ici, _ in parallelism.values()], len(devices) // slices, axes, "ici")
    dcn = _fill([dcn for _, dcn in parallelism.values()], slices, axes, "dcn")
    if slices > 1:
        return auto_mesh(mesh_utils.create_hybrid_device_mesh(ici, dcn, devices), axes)
    laid = mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)
    return auto_mesh(laid, axes)


def _fill(sizes: list[int], count: int, axes: Sequence[str], kind: str) -> list[int]:
    """Replace a -1 by the size that makes the product `count`; refuse any other product."""
    known = prod(s for s in sizes if s != -1)
    if -1 in sizes and count % known == 0:
        return [count // known if s == -1 else s for s in sizes]
    if -1 not in sizes and known == count:
        return sizes
    text = " ".join(f"{kind}_{a}_parallelism={s}" for a, s in zip(axes, sizes, strict=True))
    unit = "devices of a slice" if kind == "ici" else "slices"
    rule = f"the product must {'divide' if -1 in sizes else 'equal'} the number of {unit}, {count}"
    remedy = f"change one {kind}_*_parallelism, or set one to -1 to use the remaining {unit}"
    raise MeshError(text, f"product {known}", rule, remedy)
