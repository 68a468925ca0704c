"""Maps an NNX module's parameters to diffusers' names and layouts; reads no file or array.

The attributes on the path of a parameter, joined by dots, are its name in diffusers, with two
exceptions: the parameter itself (`kernel` is `weight`, with its axes reversed), and names that a
class lists in `diffusers_names`. More attributes of a class describe its files:

    diffusers_stacked   layers that the module stacks along a leading axis (`nnx.scan`, `nnx.vmap`);
                        diffusers numbers them, like the layers of an `nnx.List`
    diffusers_fused     tensors that store the rows of several layers in sequence, with the names of
                        these layers; loaded and saved in this form
    diffusers_may_fuse  like `diffusers_fused` when loaded; saved as separate layers
    diffusers_ignored   tensors of the model's files that no version of the model uses
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flax import nnx

from maxattn.errors import WeightsError

Path = tuple[Any, ...]
LORA = {"lora_a": "lora_A", "lora_b": "lora_B"}  # nnx's names of the matrices, and peft's
WRAPPERS: Mapping[str, type[nnx.Module]] = {"lora": nnx.LoRALinear, "base_module": nnx.LoRA}


class FusedPlace(NamedTuple):
    """A layer's place in a fused tensor, and whether saving writes the fused tensor."""

    name: str
    index: int
    written: bool


@dataclass(frozen=True)
class Entry:
    """A tensor in diffusers, and its parameter in the module (or layer of a stacked parameter)."""

    name: str  # the tensor's name in diffusers
    path: Path  # the parameter's path in the module
    shape: tuple[int, ...]  # the tensor's shape in diffusers
    # axis i of the parameter (without a stacked axis) is axis axes[i] of the tensor
    axes: tuple[int, ...]
    layer: int | None = None  # the index in a stacked parameter, or None
    fused: tuple[FusedPlace, ...] = ()  # the fused tensors that may contain this tensor

    @property
    def owner(self) -> str:
        """Return the name of the layer that has this weight or bias."""
        return self.name.removesuffix(".weight").removesuffix(".bias")


def entries(module: nnx.Module, prefix: str = "") -> tuple[Entry, ...]:
    """List the tensors that diffusers has for a module, in the order of its parameters.

    Args:
        module: with arrays, or without from `nnx.eval_shape`.
        prefix: put before every name, such as "transformer.".

    Raises:
        WeightsError: `module` is no NNX module, has a parameter that is no array, or two of one
            name.
    """
    if not isinstance(module, nnx.Module):
        kind, rule = type(module).__name__, "it must be an NNX module"
        raise WeightsError("module", kind, rule, "pass an nnx.Module")
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    arrays = ((path, v) for path, v in flat if v.get_value() is not None)
    every = tuple(e for path, v in arrays for e in _entries_of(module, path, v, prefix))
    paths: dict[str, Path] = {}
    for e in every:
        if (other := paths.setdefault(e.name, e.path)) != e.path:
            found = " and ".join(".".join(map(str, path)) for path in (other, e.path))
            rule = f"parameters must have different names in files, and both have {e.name}"
            remedy = 'list another name in their class, such as diffusers_names = {"scale": "by"}'
            raise WeightsError("module", found, rule, remedy)
    return every


def variable_at(module: nnx.Module, path: Path) -> Any:
    """Return the variable at a path of attributes and list indices."""
    here: Any = module
    for part in path:
        here = here[part] if isinstance(part, int) else getattr(here, part)
    return here


def _entries_of(module: nnx.Module, path: Path, variable: Any, prefix: str) -> Iterator[Entry]:
    names: list[str] = []
    owner: Any = module
    owners: list[tuple[int, type]] = []
    stacked: int | None = None
    rest = list(path)
    while len(rest) > 1:
        if isinstance(owner, WRAPPERS.get(str(rest[0]), ())):
            # A LoRA of nnx, and the layer under it, have the name of the layer that they adapt.
            owner, rest = getattr(owner, rest[0]), rest[1:]
            continue
        owners.append((len(names), type(owner)))
        taken, name = _step(owner, rest)
        # The name means a stacked module, unless the attribute is an `nnx.List`.
        is_list = isinstance(getattr(owner, str(rest[0]), None), nnx.List)
        if name in getattr(type(owner), "diffusers_stacked", ()) and not is_list:
            stacked = len(names)
        names.append(name)
        owner = variable_at(owner, tuple(rest[:taken]))
        rest = rest[taken:]
    value = variable.get_value()
    if not hasattr(value, "shape"):
        found = f"{type(variable).__name__} {'.'.join(map(str, path))}"
        rule = f"parameters must be arrays, and this one is a {type(value).__name__}"
        raise WeightsError("module", found, rule, "put an array there, without scales")
    shape = tuple(value.shape)
    if rest[0] == "kernel":
        _check_stack(owner, shape, stacked, prefix + ".".join(names))
    end, axes = _parameter(owner, rest[0], len(shape) - (stacked is not None))
    for layer in (None,) if stacked is None else range(shape[0]):
        full, theirs = [*names, end], shape
        if stacked is not None:
            full, theirs = [*full[: stacked + 1], str(layer), *full[stacked + 1 :]], shape[1:]
        fused = tuple(_places(owners, names, full, prefix))
        theirs = tuple(theirs[axes.index(axis)] for axis in range(len(axes)))
        yield Entry(prefix + ".".join(full), path, theirs, axes, layer, fused)


def _check_stack(owner: Any, shape: tuple[int, ...], stacked: int | None, name: str) -> None:
    """Refuse the kernel of stacked layers that no class lists, or whose layers come not first."""
    if isinstance(owner, nnx.Linear):
        own: tuple[int, ...] = (owner.in_features, owner.out_features)
    elif isinstance(owner, nnx.Conv):
        own = tuple(owner.kernel_shape)
    else:
        return
    first = int(stacked is not None)
    found = f"kernel {list(shape)} of {name or 'the module'}"
    if len(shape) > len(own) + first:
        which = "along several axes" if first else "along an axis that no class names"
        rule = f"its layers are stacked {which}, but files have a tensor for each layer"
        remedy = "stack all layers by one nnx.vmap"
        if not first:
            remedy = "in the class whose attribute is the stack, name the attribute, such as"
            remedy += ' diffusers_stacked = ("blocks",)'
        raise WeightsError("module", found, rule, remedy)
    drops = [shape[:at] + shape[at + 1 :] for at in range(len(shape))]
    if first and shape[1:] != own and own in drops[1:]:
        rule = f"a layer's kernel is {list(own)}, so the axis of layers is not the first one"
        raise WeightsError("module", found, rule, "stack layers by nnx.vmap(..., out_axes=0)")


def _places(
    owners: list[tuple[int, type]], names: list[str], full: list[str], prefix: str
) -> Iterator[FusedPlace]:
    """Yield the fused tensors that may contain a tensor, by the classes on its path."""
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
    """Return how many parts of a path form diffusers' next name, and that name."""
    renamed: Mapping[str, str] = getattr(type(owner), "diffusers_names", {})
    for taken in range(len(rest) - 1, 0, -1):
        if (name := renamed.get(".".join(map(str, rest[:taken])))) is not None:
            return taken, name
    return 1, str(rest[0])


def _parameter(owner: Any, name: str, ndim: int) -> tuple[str, tuple[int, ...]]:
    """Return torch's name of a parameter, and the axes of its tensor."""
    same, renamed = tuple(range(ndim)), getattr(type(owner), "diffusers_names", {})
    # flax [in, out] is torch [out, in]; [*spatial, in, out] is [out, in, *spatial].
    if name == "kernel" and isinstance(owner, nnx.Linear | nnx.Conv):
        return "weight", (*same[2:], 1, 0)
    if isinstance(owner, nnx.LoRA) and name in LORA:
        return f"{LORA[name]}.weight", (*same[2:], 1, 0)
    if name in ("scale", "embedding") and name not in renamed:
        return "weight", same
    if name == "kernel" and name not in renamed:
        kind = type(owner).__name__
        rule = (
            f"files have kernels of nnx.Linear and nnx.Conv, and the axes of {kind}'s are unknown"
        )
        remedy = 'use nnx.Linear, or a subclass with diffusers_names = {"kernel": "weight"}'
        raise WeightsError("module", f"a kernel of {kind}", rule, remedy)
    return renamed.get(name, name), same
