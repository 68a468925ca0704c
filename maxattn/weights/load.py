"""Loads weights in diffusers' names and layouts into a module, and saves them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from maxattn import sharding
from maxattn.errors import WeightsError
from maxattn.weights import checks
from maxattn.weights.checks import Loaded, dtype_name
from maxattn.weights.files import read_slice
from maxattn.weights.fused import unfused, written
from maxattn.weights.layer_names import in_our_names
from maxattn.weights.names import Entry, entries, variable_at
from maxattn.weights.saves import SHARD_BYTES, Form, save_tensors


def load_diffusers(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    strict: bool = True,
    *,
    prefix: str = "",
    mesh: jax.sharding.Mesh | None = None,
) -> Loaded:
    """Load weights in diffusers' names and layouts into a module, in place.

    Each tensor is read slice by slice onto the devices of its parameter, in the parameter's dtype
    and sharding. All tensors are read before the module changes, so an error changes nothing. Until
    then the devices need memory for the old and the new arrays.

    Args:
        module: any NNX module of Linear, Conv, norm and Embed layers, maxattn's included. It may be
            without arrays, from `nnx.eval_shape`, which saves host memory.
        tensors: a folder or file of safetensors, or a state dict of numpy, jax or torch arrays.
            Tensors of Wan may have the names of Wan's code, also with prefixes of Self-Forcing and
            related projects, such as "generator_ema.model."; averaged parameters are preferred.
        strict: True refuses missing and unexpected tensors; False returns and logs them. Wrong
            shapes are always refused.
        prefix: prefix of the module's tensors in the file, such as "transformer."; other tensors
            are ignored.
        mesh: device mesh onto which all parameters go, as `maxattn.sharding.place` puts them.
            Without it, each stays where it is, and those without arrays go to one device.

    Raises:
        WeightsError: tensors are missing, unexpected or misshapen (all are listed), are not
            floating point (all are listed), or have numbers that overflow the parameter's dtype; or
            a file cannot be read.

    Example:
        >>> import numpy as np
        >>> from flax import nnx
        >>> from maxattn.weights import load_diffusers
        >>> class Model(nnx.Module):
        ...     def __init__(self):
        ...         self.to_q = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> model = Model()
        >>> weight = np.arange(6, dtype=np.float32).reshape(2, 3)  # [out, in], as torch has it
        >>> state = {"to_q.weight": weight, "to_q.bias": np.zeros(2, np.float32)}
        >>> load_diffusers(model, state)
        Loaded(missing=(), unexpected=())
        >>> model.to_q.kernel[...].tolist()
        [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    """
    checks.mesh(mesh)
    result, held, parameters = _fitting(module, tensors, strict, prefix)
    # Every array is made before the module changes, so that an error changes nothing.
    arrays = {}
    for path, parts in parameters.items():
        variable = variable_at(module, path)
        old = variable.get_value()
        read: Any = partial(_slice, parts, held, old.dtype)
        where = _sharding(path, variable, old, mesh)
        arrays[path] = jax.make_array_from_callback(old.shape, where, read)
    moved = None if mesh is None else _others_on(mesh, module, arrays)
    for path, array in arrays.items():
        variable_at(module, path).set_value(array)
    if mesh is not None:
        nnx.update(module, moved)
        sharding.log_replicated(nnx.state(module), mesh)
    return result


def check_diffusers(
    module: nnx.Module,
    tensors: Mapping[str, Any] | str | Path,
    strict: bool = True,
    *,
    prefix: str = "",
) -> Loaded:
    """Check the names, shapes and dtypes of weights against a module, which may lack arrays.

    The arguments are as for `load_diffusers`; no values are read.

    Raises:
        WeightsError: as for `load_diffusers`, except for overflow.
    """
    return _fitting(module, tensors, strict, prefix)[0]


def _fitting(
    module: nnx.Module, tensors: Any, strict: bool, prefix: str
) -> tuple[Loaded, Mapping[str, Any], dict[Any, list[Entry]]]:
    """Return the unmatched names, the tensors by diffusers' names, and each parameter's tensors."""
    checks.prefix(prefix)
    wanted = entries(module, prefix)
    held = unfused(in_our_names(checks.tensors(tensors), wanted, prefix), wanted)
    # Some files have tensors that no version of the model uses.
    unread = frozenset(getattr(type(module), "diffusers_ignored", ()))
    found = {n for n in held if n.startswith(prefix) and unread.isdisjoint(n.split("."))}
    names = dict.fromkeys(entry.name for entry in wanted)
    result = Loaded(tuple(n for n in names if n not in found), tuple(sorted(found - names.keys())))
    checks.arrays((name for name in names if name in found), held)
    checks.names(wanted, held, result, strict, prefix)
    parts: dict[Any, list[Entry]] = {}
    for entry in wanted:
        parts.setdefault(entry.path, []).append(entry)
    # A stacked parameter is loaded only if all of its layers are there.
    whole = {path: some for path, some in parts.items() if all(e.name in held for e in some)}
    # A parameter of integers is loaded only from its own dtype.
    dtypes = {path: dtype_name(variable_at(module, path).get_value().dtype) for path in whole}
    cast = (e.name for path, some in whole.items() for e in some
            if dtype_name(held[e.name].dtype) != dtypes[path])  # fmt: skip
    checks.dtypes(cast, held)
    return result, held, whole


def to_diffusers(module: nnx.Module, prefix: str = "") -> dict[str, np.ndarray]:
    """Return a module's parameters in diffusers' names and layouts, bit for bit, on the host.

    `prefix` is put before every name. The matrices of an `nnx.LoRA` are `lora_A.weight` and
    `lora_B.weight` of the layer that it adapts, as in files of peft and diffusers.

    Raises:
        WeightsError: the module has variables that files do not have, such as running statistics,
            or kernels of whole numbers or 8 bits.
    """
    checks.prefix(prefix)
    every = written(entries(module, prefix))
    checks.savable(module, every)
    # safetensors' save_file writes the memory of a transposed array in the wrong order.
    return {name: np.ascontiguousarray(_joined(module, parts)) for name, parts in every.items()}


def save_diffusers(
    module: nnx.Module, folder: str | Path, shard_bytes: int = SHARD_BYTES
) -> tuple[Path, ...]:
    """Write a module's parameters as a folder that diffusers loads.

    Only one tensor at a time is on the host.

    Args:
        module: any NNX module with arrays.
        folder: created if it is missing. An earlier save in it stays readable until all files are
            written. Then its files that were not replaced are removed, but no other files.
        shard_bytes: the most bytes of a file, unless one tensor has more.

    Raises:
        WeightsError: the folder cannot be written, or has the index of another model; or the module
            has parameters that the files of a model do not have, such as LoRA.

    Example:
        >>> import tempfile
        >>> from flax import nnx
        >>> from maxattn.weights import SafeTensors, save_diffusers
        >>> class Model(nnx.Module):
        ...     def __init__(self):
        ...         self.to_q = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paths = save_diffusers(Model(), folder)
        ...     names = {name: tensor.shape for name, tensor in SafeTensors(folder).items()}
        >>> [path.name for path in paths]
        ['diffusion_pytorch_model.safetensors']
        >>> sorted(names.items())
        [('to_q.bias', (2,)), ('to_q.weight', (2, 3))]
    """
    folder, shard_bytes = checks.folder(folder), checks.shard_bytes(shard_bytes)
    every = written(entries(module))
    checks.savable(module, every)
    checks.no_lora(module, every)
    forms = {}
    for name, parts in every.items():
        rows = sum(entry.shape[0] for entry in parts) if len(parts) > 1 else None
        shape = parts[0].shape if rows is None else (rows, *parts[0].shape[1:])
        forms[name] = Form(shape, variable_at(module, parts[0].path).get_value().dtype)
    return save_tensors(
        forms, lambda name: _joined(module, every[name]), folder, shard_bytes=shard_bytes
    )


def _joined(module: nnx.Module, parts: list[Entry]) -> np.ndarray:
    """Return the tensor of one layer, or of several fused layers in sequence."""
    read = [_read(module, entry) for entry in parts]
    return read[0] if len(read) == 1 else np.concatenate(read)


def _read(module: nnx.Module, entry: Entry) -> np.ndarray:
    value = checks.value_at(module, entry)
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        rule = "its parameters must be on devices of this process, and this one is on others too"
        remedy = "gather it first, with multihost_utils.process_allgather"
        raise WeightsError("module", entry.name, rule, remedy)
    ours = np.asarray(value if entry.layer is None else value[entry.layer])
    return ours.transpose(np.argsort(entry.axes)) if entry.axes else ours


# ---- one parameter -------------------------------------------------------------------------------


def _sharding(path: Any, variable: Any, old: Any, mesh: Any) -> jax.sharding.Sharding:
    if mesh is not None:
        return sharding.variable_sharding(path, variable, mesh)
    if isinstance(old, jax.Array):
        return old.sharding
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def _others_on(mesh: jax.sharding.Mesh, module: nnx.Module, loaded: Collection[Any]) -> Any:
    """Return the state of the variables with arrays that were not loaded, on a mesh."""

    def is_other(path: Any, variable: Any) -> bool:
        return path not in loaded and isinstance(variable.get_value(), jax.Array)

    state = nnx.state(module, is_other)
    return jax.tree.map(jax.device_put, state, sharding.parameter_shardings(state, mesh))


def _slice(
    parts: list[Entry], held: Mapping[str, Any], dtype: Any, index: tuple[slice, ...]
) -> np.ndarray:
    if parts[0].layer is None:
        return _piece(parts[0], held, index, dtype)
    layers = range(len(parts))[index[0]]
    return np.stack([_piece(parts[layer], held, index[1:], dtype) for layer in layers])


def _piece(
    entry: Entry, held: Mapping[str, Any], index: tuple[slice, ...], dtype: Any
) -> np.ndarray:
    theirs = [slice(None)] * len(index)
    for ours, axis in zip(index, entry.axes, strict=True):
        theirs[axis] = slice(ours.start or 0, entry.shape[axis] if ours.stop is None else ours.stop)
    numbers = read_slice(held, entry.name, tuple(theirs))
    return checks.rounded(entry, numbers, dtype).transpose(entry.axes)
