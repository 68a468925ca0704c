"""Split activations, batches and parameters over a mesh, outside of attention."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from itertools import combinations
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from maxattn.errors import InputError, MeshError
from maxattn.jax_private.mesh import ambient_mesh, with_auto_axes
from maxattn.sharding.axes import AXES
from maxattn.sharding.mesh import check_devices, check_mesh, mesh_shape
from maxattn.sharding.shards import spec_of, ways

log = logging.getLogger("maxattn")

LAYER_DIMS = "layer_dims"
"""Key of a parameter's metadata: its shape in one layer, with None for an unknown size."""


def constrain(x: jax.Array, mesh: Any, letters: str) -> jax.Array:
    """Constrain how an activation is split, by letters such as "BT." for [B, T, channels].

    Without a mesh, x is returned unchanged. The compiler chooses for an axis that does not divide
    over the mesh, since replicating the axis would gather it.
    """
    shape = mesh_shape(mesh)
    if not shape:
        return x
    even = (n % ways(letter, shape) == 0 for n, letter in zip(x.shape, letters, strict=True))
    cut = zip(spec_of(letters, shape), even, strict=True)
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(axes if axes is None or fits else free for axes, fits in cut))
    ambient = ambient_mesh()
    target = with_auto_axes(mesh) if ambient is None else ambient
    if isinstance(target, AbstractMesh):
        check_devices(target, x)
    where = spec if isinstance(ambient, AbstractMesh) else NamedSharding(target, spec)
    return jax.lax.with_sharding_constraint(x, where)


def batch_sharding(mesh: Mesh, ndim: int) -> NamedSharding:
    """Return the sharding of a batch of data, whose first axis is split over (data, fsdp)."""
    axes = spec_of("B", mesh_shape(mesh))
    return NamedSharding(mesh, PartitionSpec(*axes, *(None,) * (ndim - 1)))


def on_axes(*axes: str | None, dims: tuple[int, ...] | None = None) -> dict[str, Any]:
    """Return flax's metadata with a parameter's mesh axes, one name or None per array axis.

    Under `jax.set_mesh`, flax looks up every name, so names that the mesh lacks are left out. If
    layers are stacked, the parameter's shape, `dims`, shows which axis is the stacked one; without
    it the stacked axes are the first ones.
    """
    ambient = ambient_mesh()
    known = AXES if ambient is None else ambient.axis_names
    there = tuple(axis if axis in known else None for axis in axes)
    # Without eager_sharding=False, flax requires a mesh for parameters with axis names.
    return {"out_sharding": there, "eager_sharding": False, LAYER_DIMS: dims or (None,) * len(axes)}


def parameter_spec(names: Sequence[Any] | None, dims: Sequence[int], mesh: Mesh) -> PartitionSpec:
    """Return a parameter's spec without axes that the mesh lacks or cannot split evenly."""
    sizes = dict(mesh_shape(mesh))

    def entry(name: Any, dim: int) -> Any:
        axes = name if isinstance(name, tuple | list) else (name,)
        there = tuple(axis for axis in axes if axis in sizes)
        if not there or dim % prod(sizes[axis] for axis in there):
            return None
        return there[0] if len(there) == 1 else there

    names = tuple(names or ()) + (None,) * (len(dims) - len(names or ()))
    return PartitionSpec(*(entry(n, d) for n, d in zip(names, dims, strict=False)))


def variable_sharding(
    path: Sequence[Any], variable: Any, mesh: Mesh, at_end: Collection[Any] = ()
) -> NamedSharding:
    """Return the sharding of the variable at a path of an NNX state, by its axis names.

    Axes that `nnx.vmap` stacked without a name are not split. Optimiser states whose shape is not
    their parameter's, such as adafactor's sums of rows, are replicated. `at_end` are modules whose
    stacked axes are the last ones; see `_stacked_at_end`.
    """
    from flax import nnx

    metadata, dims = variable.get_metadata(), tuple(variable.get_value().shape)
    names = tuple(metadata.get("sharding_names", metadata.get("out_sharding")) or ())
    own: tuple[int | None, ...] | None = metadata.get(LAYER_DIMS)
    fits = _axes_of_layer((None,) * len(names) if own is None else own, dims)
    # Of several choices, the one whose stacked axes are the first ones, or the last ones.
    at = fits[0 if _module(path) in at_end else -1] if fits else None
    if at is None and isinstance(variable, nnx.OptState):
        names = ()
    elif own is not None and len(dims) == len(own):
        names = names[-len(own) :]  # a layer that was taken out of a stack with a named axis
    elif 0 < len(names) < len(dims):
        if own is None and len(dims) == 2 and path[-1] in ("kernel", "embedding"):
            at = (0,)  # not stacked: as in a PartitionSpec, the last names may be left out
        elif own is None:
            _warn_of_unnamed_axes(".".join(map(str, path)), names, dims)
        first = len(dims) - len(names)
        named = dict(zip(at or range(first, len(dims)), names[-len(at or names) :], strict=False))
        names = tuple(named.get(axis) for axis in range(len(dims)))
    spec = parameter_spec(names, dims, mesh)
    used = Counter(axis for e in spec for axis in (e if isinstance(e, tuple) else (e,)) if axis)
    if twice := [axis for axis, count in used.items() if count > 1]:
        rule = f"a mesh axis splits one axis of an array, and {twice[0]} would split two"
        remedy = 'name the axis of stacked layers otherwise, such as {nnx.PARTITION_NAME: "layers"}'
        raise MeshError(".".join(map(str, path)), f"axis names {names}", rule, remedy)
    return NamedSharding(mesh, spec)


def _stacked_at_end(variables: Iterable[tuple[Sequence[Any], Any]]) -> set[tuple[Any, ...]]:
    """List the modules whose layers `nnx.vmap` stacked along the last axes.

    A module is here if a variable's stacked axes cannot be the first ones. Its other variables are
    stacked alike, also where their sizes leave a choice, as those of a bias of 8 in 8 layers.
    """
    found = set()
    for path, variable in variables:
        own = variable.get_metadata().get(LAYER_DIMS)
        dims = getattr(variable.get_value(), "shape", ())
        fits = _axes_of_layer(own, dims) if own and len(own) < len(dims) else []
        if fits and fits[0][-1] < len(dims) - 1 and fits[-1][0] == 0:
            found.add(_module(path))
    return found


def _module(path: Sequence[Any]) -> tuple[Any, ...]:
    """Return the path of the module around a variable's layer."""
    return tuple(path[:-2])


def _axes_of_layer(own: Sequence[int | None], dims: Sequence[int]) -> list[tuple[int, ...]]:
    """List the choices of an array's axes that have a layer's sizes, the last axes last."""
    return [
        axes
        for axes in combinations(range(len(dims)), len(own))
        if all(n in (None, dims[axis]) for n, axis in zip(own, axes, strict=True))
    ]


@cache
def _warn_of_unnamed_axes(path: str, names: tuple[Any, ...], dims: tuple[int, ...]) -> None:
    log.warning(
        "%s has shape %s and the axis names %s: the names are taken for the last axes, as in layers"
        " that nnx.vmap stacks. Name every axis, with None for one that is not split; nnx.vmap does"
        " so with transform_metadata={nnx.PARTITION_NAME: None}.",
        path, list(dims), names,
    )  # fmt: skip


def parameter_shardings(state: Any, mesh: Mesh) -> Any:
    """Return a tree with the `NamedSharding` of each array, by the axis names in an NNX state.

    The state may be abstract, or the state of an optimiser. Arrays without names are replicated.
    An axis over which `nnx.vmap` stacked layers is not split, so that `nnx.scan` can take slices.
    """
    from flax import nnx

    leaves, tree = jax.tree_util.tree_flatten_with_path(
        state, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    variables = [
        ([getattr(key, "key", getattr(key, "idx", key)) for key in path], variable)
        for path, variable in leaves
    ]
    at_end = _stacked_at_end(variables)
    return tree.unflatten(
        variable.replace(variable_sharding(path, variable, mesh, at_end))
        if hasattr(variable.get_value(), "shape")
        else variable  # optax's place of a parameter that has no state
        for path, variable in variables
    )


def place(module: Any, mesh: Mesh | None) -> None:
    """Move the parameters of an NNX module or optimiser onto a mesh, in place.

    Kernels are split over fsdp and tensor by their axis names; other parameters are replicated. The
    axis of layers that `nnx.vmap` stacked is not split.

    Args:
        module: the module, with arrays.
        mesh: the mesh; with None, no parameter is moved.

    Raises:
        InputError: `module` is no NNX module or optimiser, or has no arrays yet.
        MeshError: `mesh` is no mesh of devices.
    """
    from flax import nnx

    if not isinstance(module, nnx.Pytree):
        rule = "place moves the parameters of an NNX module or optimiser"
        remedy = "pass one, or move arrays with jax.device_put"
        raise InputError("module", type(module).__name__, rule, remedy)
    if mesh is None:
        return
    if isinstance(mesh, Mapping | AbstractMesh):
        said = "AbstractMesh" if isinstance(mesh, AbstractMesh) else dict(mesh)
        rule = "the mesh must have devices, and this has only sizes"
        raise MeshError("mesh", said, rule, "pass config.make_mesh()")
    check_mesh(mesh)
    state = nnx.state(module)
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        rule = "the module's parameters are shapes without numbers, as from nnx.eval_shape"
        remedy = "load weights with mesh=, which puts them on the mesh"
        raise InputError("module", type(module).__name__, rule, remedy)
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state)):
        rule = "some parameters were deleted, as arrays are that a program took by donation"
        remedy = "use what that program returned, or do not donate the array"
        raise InputError("module", type(module).__name__, rule, remedy)
    nnx.update(module, jax.tree.map(jax.device_put, state, parameter_shardings(state, mesh)))
    log_replicated(state, mesh)


def log_replicated(state: Any, mesh: Mesh) -> None:
    """Warn once if kernels without axis names take more of a device than those that are split."""
    from flax import nnx

    sizes = dict(mesh_shape(mesh))
    if max(sizes.get("fsdp", 1), sizes.get("tensor", 1)) == 1:
        return
    whole, split = {}, 0
    for path, variable in nnx.to_flat_state(state):
        if isinstance(variable, nnx.Param) and hasattr(value := variable.get_value(), "dtype"):
            shard = variable_sharding(path, variable, mesh).shard_shape(value.shape)
            metadata, size = variable.get_metadata(), prod(shard) * value.dtype.itemsize
            if metadata.get("sharding_names", metadata.get("out_sharding")):
                split += size
            elif path[-1] in ("kernel", "embedding"):
                whole[".".join(map(str, path))] = size
    if sum(whole.values()) > split:
        _warn_of_replicated(tuple(whole), sum(whole.values()))


@cache
def _warn_of_replicated(names: tuple[str, ...], size: int) -> None:
    log.warning(
        "%d kernels without axis names are whole on every device of the mesh, %.1f MiB a device:"
        " %s%s. To split a layer's kernel, build it with"
        ' kernel_metadata=maxattn.sharding.on_axes("fsdp", "tensor").',
        len(names), size / 2**20, ", ".join(names[:3]), ", ..." if len(names) > 3 else "",
    )  # fmt: skip
