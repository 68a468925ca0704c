"""Put diffusers' tensors into a module, and take them out again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxattn import sharding
from maxattn.errors import WeightsError
from maxattn.weights import checks, files
from maxattn.weights.access import dtype_name, on_host, variable_at
from maxattn.weights.checks import LISTED
from maxattn.weights.names import Entry, entries
from maxattn.weights.safetensors_writer import Form

log = logging.getLogger("maxattn")


@dataclass(frozen=True)
class Loaded:
    """Say what a load did not find a place for.

    Args:
        missing: tensors that the module needs and the file lacks; their parameters are as they
            were.
        unexpected: tensors of the file that the module has no parameter for.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load_diffusers(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    strict: bool = True,
    *,
    prefix: str = "",
    mesh: jax.sharding.Mesh | None = None,
) -> Loaded:
    """Load weights in diffusers' names and layouts into a module, in place.

    Every tensor goes straight to the devices that hold it, slice by slice; each keeps the
    parameter's dtype and place. Nothing is changed when anything does not fit.

    Args:
        module: any NNX module of Linear, Conv, norm and Embed layers, maxattn's own ones too; one
            from `nnx.eval_shape`, without arrays, gets its first ones here, so that host memory
            never holds it twice.
        tensors: a folder or file of safetensors, or a state dict (numpy, jax or torch arrays).
        strict: refuse missing and unexpected tensors; False returns and logs them. Wrong shapes are
            always refused.
        prefix: of the tensors that are meant, such as "transformer."; others are then not looked
            at.
        mesh: where to put parameters that have no place yet, as their axis names say; default one
            device.

    Raises:
        WeightsError: naming every missing, unexpected and misshapen tensor at once; every one that
            holds no floating point numbers; one whose largest number the parameter's dtype does not
            reach; files that cannot be read.
    """
    wanted = entries(module, prefix)
    held = checks.tensors(tensors)
    # Some files hold tensors that no version of the model reads; its class names them.
    unread = getattr(type(module), "diffusers_ignored", ())
    found = {
        name
        for name in held
        if name.startswith(prefix) and not any(part in unread for part in name.split("."))
    }
    result = Loaded(
        tuple(e.name for e in wanted if e.name not in found),
        tuple(sorted(found - {e.name for e in wanted})),
    )
    checks.arrays((e.name for e in wanted if e.name in found), held)
    _check(wanted, held, result, strict, prefix)
    parameters = _by_parameter(wanted, held)
    _check_numbers(module, parameters, held)
    for path, parts in parameters.items():
        _put(module, path, parts, held, mesh)
    return result


def to_diffusers(module: nnx.Module, prefix: str = "") -> dict[str, np.ndarray]:
    """Return the parameters of a module in diffusers' names and layouts, bit for bit, on the host.

    Args:
        module: with arrays.
        prefix: put before every name.
    """
    return {entry.name: _read(module, entry) for entry in entries(module, prefix)}


def save_diffusers(
    module: nnx.Module, folder: str | Path, shard_bytes: int = files.SHARD_BYTES
) -> tuple[Path, ...]:
    """Write the parameters of a module as a folder that diffusers loads; one tensor at a time is
    held on the host.

    Args:
        module: with arrays.
        folder: made where it is missing. An earlier save there gives way: until all is written it
            is what is read, then its files are removed, and nothing else.
        shard_bytes: the largest file.

    Raises:
        WeightsError: the folder cannot be written, or holds the index of a model of another name.
    """
    folder = checks.folder(folder)
    every = {entry.name: entry for entry in entries(module)}
    forms = {
        name: Form(e.shape, variable_at(module, e.path).get_value().dtype)
        for name, e in every.items()
    }
    return files.save_tensors(
        forms, lambda name: _read(module, every[name]), folder, shard_bytes=shard_bytes
    )


# ---- what does not fit ---------------------------------------------------------------------------


def _check(
    wanted: tuple[Entry, ...], held: Mapping[str, Any], result: Loaded, strict: bool, prefix: str
) -> None:
    shapes = ((e, tuple(held[e.name].shape)) for e in wanted if e.name in held)
    wrong = [
        f"{e.name} is {got}, and the module has {e.shape}" for e, got in shapes if got != e.shape
    ]
    problems = {"misshapen": tuple(wrong)}
    if strict:
        problems |= {"missing": result.missing, "unexpected": result.unexpected}
    elif result.missing or result.unexpected:
        log.warning(
            "weights: %s",
            "; ".join(
                _listed("missing", result.missing) + _listed("unexpected", result.unexpected)
            ),
        )
    if not any(problems.values()):
        return
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in problems.items() if names)
    lines = [line for kind, names in problems.items() for line in _listed(kind, names)]
    raise WeightsError(
        "weights",
        counts,
        "\n          ".join(["names and shapes must be the module's", *lines]),
        _remedy(result, prefix),
    )


def _check_numbers(
    module: nnx.Module, parameters: Mapping[Any, list[Entry]], held: Mapping[str, Any]
) -> None:
    """Refuse tensors whose numbers the parameters cannot hold; a parameter of integers takes its
    own dtype alone.
    """
    pairs = [
        (e, variable_at(module, path).get_value().dtype)
        for path, parts in parameters.items()
        for e in parts
    ]
    pairs = [
        (e, dtype) for e, dtype in pairs if dtype_name(dtype) != dtype_name(held[e.name].dtype)
    ]
    checks.dtypes((e.name for e, _ in pairs), held)
    checks.overflow(
        [(e, dtype) for e, dtype in pairs if checks.is_floating(dtype_name(dtype))], held
    )


def _listed(kind: str, names: tuple[str, ...]) -> list[str]:
    more = [f"{kind}: and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return [f"{kind}: {name}" for name in names[:LISTED]] + more


def _remedy(result: Loaded, prefix: str) -> str:
    """Say what would help: where every name lacks the same beginning, that beginning."""
    for name in result.missing[:1]:
        bare = name.removeprefix(prefix)
        for other in result.unexpected:
            if other.endswith(f".{bare}"):
                return (
                    f"the names begin with {other.removesuffix(bare)!r}: pass"
                    f" prefix={other.removesuffix(bare)!r}"
                )
    return "build the module with the sizes of the weights; strict=False loads what fits by name"


# ---- one parameter -------------------------------------------------------------------------------


def _by_parameter(wanted: tuple[Entry, ...], held: Mapping[str, Any]) -> dict[Any, list[Entry]]:
    """Group the tensors by the parameter they fill; a stacked one is filled whole or not at all."""
    parts: dict[Any, list[Entry]] = {}
    for entry in wanted:
        parts.setdefault(entry.path, []).append(entry)
    return {path: some for path, some in parts.items() if all(e.name in held for e in some)}


def _put(
    module: nnx.Module, path: Any, parts: list[Entry], held: Mapping[str, Any], mesh: Any
) -> None:
    variable = variable_at(module, path)
    old = variable.get_value()
    place = _place(variable, old, mesh)
    read: Any = partial(_slice, parts, held, old)
    variable.set_value(jax.make_array_from_callback(old.shape, place, read))


def _place(variable: Any, old: Any, mesh: Any) -> jax.sharding.Sharding:
    if isinstance(old, jax.Array):
        return old.sharding
    if mesh is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    names = variable.get_metadata().get(
        "sharding_names", variable.get_metadata().get("out_sharding")
    )
    return jax.sharding.NamedSharding(mesh, sharding.parameter_spec(names, old.shape, mesh))


def _slice(
    parts: list[Entry], held: Mapping[str, Any], old: Any, index: tuple[slice, ...]
) -> np.ndarray:
    """Read what one device holds of a parameter."""
    if parts[0].layer is None:
        return _piece(parts[0], held, index).astype(old.dtype)
    layers = range(len(parts))[index[0]]
    return np.stack([_piece(parts[layer], held, index[1:]).astype(old.dtype) for layer in layers])


def _piece(entry: Entry, held: Mapping[str, Any], index: tuple[slice, ...]) -> np.ndarray:
    theirs = [slice(None)] * len(index)
    for ours, axis in zip(index, entry.axes, strict=True):
        theirs[axis] = slice(ours.start or 0, entry.shape[axis] if ours.stop is None else ours.stop)
    return on_host(held[entry.name], tuple(theirs)).transpose(entry.axes)


def _read(module: nnx.Module, entry: Entry) -> np.ndarray:
    value = checks.value_at(module, entry)
    if not value.is_fully_addressable:
        rule = "its parameters are spread over processes, and each sees its own part alone"
        raise WeightsError(
            "module", entry.name, rule, "gather it first, with multihost_utils.process_allgather"
        )
    ours = np.asarray(value if entry.layer is None else value[entry.layer])
    return ours.transpose(np.argsort(entry.axes)) if entry.axes else ours
