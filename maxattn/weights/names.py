"""diffusers' names and layouts of the parameters of an NNX module. No file or array is read here.

A path of attributes joined by dots is diffusers' name already, but for the parameter at its end
(`kernel` is `weight`, and lies the other way round) and for what a class says in `diffusers_names`.
A class that stacks its layers along a leading axis (`nnx.scan`, `nnx.vmap`) names them in
`diffusers_stacked`: diffusers numbers them, as it does those of an `nnx.List`. What its files hold
beside that, and no version of the model reads, a class names in `diffusers_ignored`.

A tensor that holds the rows of several layers one after the other stands in `diffusers_fused`, with
diffusers' names of those layers: it is read and written so. What files may hold in this way, and is
written by layers, stands in `diffusers_may_fuse`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flax import nnx

from maxattn.errors import WeightsError

Path = tuple[Any, ...]


class FusedPlace(NamedTuple):
    """The place of a layer's rows in a tensor of several layers.

    Args:
        name: of that tensor.
        index: among its layers.
        written: it is written so too, not only read.
    """

    name: str
    index: int
    written: bool


@dataclass(frozen=True)
class Entry:
    """A tensor of diffusers, and the parameter (or the layer of a stacked one) that it is.

    Args:
        name: diffusers'.
        path: the parameter's, in the module.
        shape: of the tensor as diffusers has it.
        axes: axis i of the parameter (of one layer) is axis axes[i] of the tensor.
        layer: the place in a stacked parameter, or None.
        fused: the tensors of several layers that hold it too.
    """

    name: str
    path: Path
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    layer: int | None = None
    fused: tuple[FusedPlace, ...] = ()


def entries(module: nnx.Module, prefix: str = "") -> tuple[Entry, ...]:
    """List the tensors that diffusers would have for a module, in the order of its parameters.

    Args:
        module: with arrays or, from `nnx.eval_shape`, without.
        prefix: put before every name, such as "transformer.".

    Raises:
        WeightsError: `module` is no NNX module.
    """
    if not isinstance(module, nnx.Module):
        rule = "weights are those of an NNX module"
        raise WeightsError("module", type(module).__name__, rule, "pass an nnx.Module")
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return tuple(e for path, variable in flat for e in _entries_of(module, path, variable, prefix))


def _entries_of(module: nnx.Module, path: Path, variable: Any, prefix: str) -> Iterator[Entry]:
    names: list[str] = []
    owner: Any = module
    owners: list[tuple[int, type]] = []
    stacked: int | None = None
    rest = list(path)
    while len(rest) > 1:
        owners.append((len(names), type(owner)))
        taken, name = _step(owner, rest)
        # Layers of diffusers' name are one module; a list of them numbers itself.
        is_list = isinstance(getattr(owner, str(rest[0]), None), nnx.List)
        if name in getattr(type(owner), "diffusers_stacked", ()) and not is_list:
            stacked = len(names)
        names.append(name)
        for part in rest[:taken]:
            owner = owner[part] if isinstance(part, int) else getattr(owner, part)
        rest = rest[taken:]
    end, axes = _parameter(owner, rest[0], variable.get_value().ndim - (stacked is not None))
    shape = tuple(variable.get_value().shape)
    for layer in (None,) if stacked is None else range(shape[0]):
        full, theirs = [*names, end], shape
        if stacked is not None:
            full, theirs = [*full[: stacked + 1], str(layer), *full[stacked + 1 :]], shape[1:]
        fused = tuple(_places(owners, names, full, prefix))
        theirs = tuple(theirs[axes.index(axis)] for axis in range(len(axes)))
        yield Entry(prefix + ".".join(full), path, theirs, axes, layer, fused)


def _places(
    owners: list[tuple[int, type]], names: list[str], full: list[str], prefix: str
) -> Iterator[FusedPlace]:
    """List the tensors of several layers that this one is in, by the classes on its path."""
    for depth, kind in owners:
        layer = ".".join(names[depth:])
        begin = full[: len(full) - 1 - len(names[depth:])]
        for written, which in ((True, "diffusers_fused"), (False, "diffusers_may_fuse")):
            fusions: Mapping[str, tuple[str, ...]] = getattr(kind, which, {})
            for name, layers in fusions.items():
                if layer in layers:
                    whole = prefix + ".".join([*begin, name, full[-1]])
                    yield FusedPlace(whole, layers.index(layer), written)


def _step(owner: Any, rest: list[Any]) -> tuple[int, str]:
    """Return how many parts of the path one name of diffusers covers, and that name."""
    renamed: Mapping[str, str] = getattr(type(owner), "diffusers_names", {})
    for taken in range(len(rest) - 1, 0, -1):
        if (name := renamed.get(".".join(map(str, rest[:taken])))) is not None:
            return taken, name
    return 1, str(rest[0])


def _parameter(owner: Any, name: str, ndim: int) -> tuple[str, tuple[int, ...]]:
    """Return torch's name of a parameter, and the axes of its tensor."""
    same = tuple(range(ndim))
    if name == "kernel" and isinstance(owner, nnx.Linear | nnx.Conv):
        # [in, out] is [out, in]; [*spatial, in, out] is [out, in, *spatial].
        return "weight", (*same[2:], 1, 0)
    if name in ("scale", "embedding"):
        return "weight", same
    return getattr(type(owner), "diffusers_names", {}).get(name, name), same
