"""Mesh axes, partition specs and the one `shard_map` helper. It decides nothing about kernels.

Axes: batch on (data, fsdp), sequence on context, heads on tensor. A size-1 or absent axis shards
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from maxattn.errors import InputError, MeshError, did_you_mean
from maxattn.jax_private.mesh import ambient_mesh, auto_mesh, axis_names_of_type, shard_map

if TYPE_CHECKING:
    from maxattn.config import AttentionConfig

AXES = ("data", "fsdp", "context", "tensor")
BATCH_AXES = ("data", "fsdp")
# Which mesh axes carry which array axis of q, k, v, out and lse.
LETTERS = {
    "B": BATCH_AXES,
    "T": ("context",),
    "S": ("context",),
    "N": ("tensor",),
    "K": ("tensor",),
}

MeshShape = tuple[tuple[str, int], ...]
Spec = tuple[tuple[str, ...] | None, ...]


def mesh_shape(mesh: Any) -> MeshShape:
    """Reduce a mesh to the (axis, size) pairs that a plan holds.

    Args:
        mesh: a `jax.sharding.Mesh` or `AbstractMesh`, a mapping such as {"context": 4}, or None.

    Raises:
        MeshError: for an axis name in a mapping that attention does not know, a size below 1, a
            mesh of several devices whose every axis has another name, an Explicit axis, or what is
            no mesh.
    """
    if mesh is None:
        return ()
    if isinstance(mesh, Mapping):
        return _checked_shape(mesh)
    check_mesh(mesh)
    manual = axis_names_of_type(mesh, AxisType.Manual) | surrounding_manual_axes()
    sizes = {a: s for a, s in mesh.shape.items() if s > 1 and a not in manual}
    if explicit := sorted(axis_names_of_type(mesh, AxisType.Explicit) & set(AXES) & set(sizes)):
        raise MeshError(
            "mesh",
            f"Explicit axes {', '.join(explicit)}",
            "attention lays out its operands itself, over Auto axes",
            "make the mesh with axis_types=(AxisType.Auto, ...), or call inside"
            " jax.sharding.auto_axes",
        )
    return tuple((a, sizes[a]) for a in AXES if a in sizes)


def check_mesh(mesh: Any) -> None:
    """Refuse what is no mesh, and one of several devices whose every axis has another name; None is
    no mesh.

    Raises:
        MeshError: naming what it is.
    """
    if mesh is None:
        return
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(
            "mesh",
            repr(mesh) if isinstance(mesh, str) else type(mesh).__name__,
            "a mesh is a jax.sharding.Mesh, or for a plan a mapping such as {'context': 4}",
            "make one with config.make_mesh()",
        )
    if mesh.size > 1 and not set(AXES) & set(mesh.axis_names):
        raise MeshError(
            "mesh",
            f"axes {', '.join(map(str, mesh.axis_names))}",
            f"attention is spread over {', '.join(AXES)}",
            "name the axes so, or pass no mesh",
        )


def check_surrounding(mesh: Any) -> None:
    """Refuse a mesh of several devices inside another one; None is no mesh.

    Raises:
        MeshError: naming both.
    """
    ambient = ambient_mesh()
    if ambient is not None and mesh_shape(mesh) and dict(ambient.shape) != dict(mesh.shape):
        raise MeshError(
            "mesh",
            dict(mesh.shape),
            f"the surrounding mesh is {dict(ambient.shape)}, and both must be the same",
            "leave out mesh=, or call outside of the other mesh",
        )


def surrounding_manual_axes() -> frozenset[str]:
    """Return the axes of the surrounding mesh over which a `shard_map` has split the work
    already.
    """
    ambient = ambient_mesh()
    return frozenset() if ambient is None else axis_names_of_type(ambient, AxisType.Manual)


def _checked_shape(sizes: Mapping[str, int]) -> MeshShape:
    for axis, size in sizes.items():
        if axis not in AXES:
            raise MeshError(
                "mesh",
                axis,
                f"a mesh axis is one of {', '.join(AXES)}",
                did_you_mean(axis, AXES) or "rename the axis",
            )
        if not isinstance(size, int) or size < 1:
            raise MeshError(
                "mesh",
                f"{axis}={size!r}",
                "an axis has at least one device",
                "give it a positive size",
            )
    return tuple((a, int(sizes[a])) for a in AXES if sizes.get(a, 1) > 1)


def spec_of(letters: str, shape: MeshShape) -> Spec:
    """Say over which mesh axes an array is sharded: one entry an array axis, by its letter.

    Args:
        letters: for example "BTNH"; letters without a mesh axis, and "1", are replicated.
        shape: the mesh's (axis, size) pairs.
    """
    present = dict(shape)
    axes = (tuple(a for a in LETTERS.get(letter, ()) if a in present) for letter in letters)
    return tuple(a or None for a in axes)


def ways(letter: str, shape: MeshShape) -> int:
    """Count the shards of one array axis."""
    sizes = dict(shape)
    return prod(sizes.get(a, 1) for a in LETTERS.get(letter, ()))


def to_partition_spec(spec: Spec) -> PartitionSpec:
    """Turn a plan's spec into jax's."""
    return PartitionSpec(*spec)


def over_shards(
    f: Callable[..., Any], mesh: Any, shape: MeshShape, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """Run `f` on each device's shard, over the axes of `shape`; without axes, just run it.

    Args:
        f: a function of local arrays.
        mesh: the concrete mesh, or None where `shape` is empty.
        shape: the axes that attention uses; axes that a surrounding `shard_map` made manual are not
            among them.
        in_specs, out_specs: trees of `PartitionSpec`.
    """
    ambient = ambient_mesh()
    inside = ambient is not None and bool(axis_names_of_type(ambient, AxisType.Manual))
    if not shape and not inside:
        return f
    mesh = ambient if inside else mesh
    # Axes that attention does not use become manual too: a TPU kernel is refused while any is left
    # to the compiler.
    names = {a for a, _ in shape} | axis_names_of_type(mesh, AxisType.Auto)
    if not names:
        return f
    return shard_map(f, mesh, in_specs, out_specs, names)


def axis_offset(axis: str, shape: MeshShape, local_length: int) -> Any:
    """Return the global position of this device's first token along `axis` (0 where it is not
    sharded).
    """
    return jax.lax.axis_index(axis) * local_length if axis in dict(shape) else 0


def sum_over(x: jax.Array, axes: Sequence[str], shape: MeshShape) -> jax.Array:
    """Sum over those of `axes` that the mesh has."""
    present = tuple(a for a in axes if a in dict(shape))
    return jax.lax.psum(x, present) if present else x


def pad_axis(x: jax.Array, axis: int, size: int, fill: float = 0.0) -> jax.Array:
    """Pad one axis with `fill` at its end up to `size`."""
    extra = size - x.shape[axis]
    widths = [(0, extra if i == axis else 0) for i in range(x.ndim)]
    return x if extra <= 0 else jnp.pad(x, widths, constant_values=fill)


# ---- making a mesh -------------------------------------------------------------------------------


def make_mesh(config: AttentionConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Build the mesh that a config describes: `ici_*` within a slice, `dcn_*` between slices.

    Args:
        config: its `mesh_axes` and parallelisms; one -1 each takes what is left.
        devices: default all of `jax.devices()`.

    Raises:
        MeshError: when the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    slices = len({getattr(d, "slice_index", 0) for d in devices})
    asked = config.axis_parallelism()
    axes = tuple(config.mesh_axes)
    ici = _fill([asked[a][0] for a in axes], len(devices) // slices, axes, "ici")
    dcn = _fill([asked[a][1] for a in axes], slices, axes, "dcn")
    return auto_mesh(_arrange(ici, dcn, devices), axes)


def _fill(sizes: list[int], count: int, axes: Sequence[str], kind: str) -> list[int]:
    """Replace the one -1 by what is left of `count`, and check the product."""
    known = prod(s for s in sizes if s != -1)
    text = " ".join(f"{kind}_{a}_parallelism={s}" for a, s in zip(axes, sizes, strict=True))
    unit = "devices of a slice" if kind == "ici" else "slices"
    if -1 in sizes and count % known == 0:
        return [count // known if s == -1 else s for s in sizes]
    if -1 in sizes or known != count:
        raise MeshError(
            text,
            f"product {known}",
            f"it must {'divide' if -1 in sizes else 'equal'} the number of {unit}, {count}",
            f"change one {kind}_*_parallelism, or set one to -1 to take what is left",
        )
    return sizes


def _arrange(ici: list[int], dcn: list[int], devices: list[jax.Device]) -> np.ndarray:
    from jax.experimental import mesh_utils

    if prod(dcn) > 1:
        return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices)
    return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=True)


# ---- arrays and parameters on a mesh -------------------------------------------------------------


def constrain(x: jax.Array, mesh: Any, letters: str) -> jax.Array:
    """Constrain an activation to its place on the mesh; without a mesh, return it as it is.

    Args:
        x: any array.
        mesh: a `Mesh` or None.
        letters: one a axis, for example "BT." for [B, T, channels].

    A size that does not divide over its axes is left to the compiler: replicating it would gather
    it.
    """
    shape = mesh_shape(mesh)
    if not shape:
        return x
    spec = [
        (
            axes
            if axes is None or x.shape[i] % ways(letters[i], shape) == 0
            else PartitionSpec.UNCONSTRAINED
        )
        for i, axes in enumerate(spec_of(letters, shape))
    ]
    ambient = ambient_mesh()
    target = mesh if ambient is None else ambient
    if isinstance(target, Mesh):
        return jax.lax.with_sharding_constraint(x, NamedSharding(target, PartitionSpec(*spec)))
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def batch_sharding(mesh: Mesh, ndim: int) -> NamedSharding:
    """Return the sharding of a batch of data: its first axis over (data, fsdp)."""
    axes = spec_of("B", mesh_shape(mesh))
    return NamedSharding(mesh, PartitionSpec(*axes, *(None,) * (ndim - 1)))


def parameter_spec(names: Sequence[Any] | None, dims: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Choose the spec of one parameter: its axis names where the mesh has them and the size
    divides.

    Args:
        names: the parameter's own axis names, for example ("fsdp", "tensor"), or None for
            replicated.
        dims: its shape.
        mesh: the mesh.
    """
    sizes = dict(mesh_shape(mesh))
    names = tuple(names or ()) + (None,) * (len(dims) - len(names or ()))
    return PartitionSpec(
        *(
            n if n in sizes and d % sizes[n] == 0 else None
            for n, d in zip(names, dims, strict=False)
        )
    )


def parameter_shardings(state: Any, mesh: Mesh) -> Any:
    """Map an NNX state (or abstract state) to the tree of `NamedSharding` its parameters ask for.

    Args:
        state: as `nnx.state(module)` returns it, optimiser states included; arrays without axis
            names are replicated.
        mesh: the mesh.
    """
    from flax import nnx

    def place(variable: Any) -> Any:
        names = variable.get_metadata().get(
            "sharding_names", variable.get_metadata().get("out_sharding")
        )
        value = variable.get_value()
        return variable.replace(NamedSharding(mesh, parameter_spec(names, value.shape, mesh)))

    return jax.tree.map(place, state, is_leaf=lambda x: isinstance(x, nnx.Variable))


def _check_devices(mesh: Any) -> None:
    if isinstance(mesh, Mapping | AbstractMesh):
        said = "AbstractMesh" if isinstance(mesh, AbstractMesh) else dict(mesh)
        raise MeshError(
            "mesh",
            said,
            "arrays are put on devices, and this has sizes alone",
            "pass config.make_mesh()",
        )
    check_mesh(mesh)


def place(module: Any, mesh: Mesh | None) -> None:
    """Move the parameters of an NNX module (or optimiser) onto the mesh, in place.

    Kernels are split over fsdp and tensor as their axis names say, the rest is replicated.

    Args:
        module: with arrays.
        mesh: None, which `config.make_mesh` never returns, moves nothing: so a program may run with
            and without one.

    Raises:
        InputError: `module` is no NNX module or optimiser, or has no arrays yet.
        MeshError: `mesh` is no mesh of devices.
    """
    from flax import nnx

    if not isinstance(module, nnx.Pytree):
        rule = "place moves the parameters of an NNX module or optimiser"
        raise InputError(
            "module", type(module).__name__, rule, "pass one, or move arrays with jax.device_put"
        )
    if mesh is None:
        return
    _check_devices(mesh)
    state = nnx.state(module)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        rule = "its parameters have shapes and no numbers yet, as nnx.eval_shape leaves them"
        raise InputError(
            "module", type(module).__name__, rule, "load weights with mesh=, which puts them there"
        )
    shardings = parameter_shardings(state, mesh)
    nnx.update(module, jax.tree.map(partial(jax.device_put), state, shardings))
