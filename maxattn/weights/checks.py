"""Refuses what is no module, no tensors or no weights; it changes nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.config.errors import plain, printable
from maxattn.config.numbers import whole
from maxattn.errors import WeightsError
from maxattn.jax_private.mesh import is_tracer
from maxattn.weights import files
from maxattn.weights.access import dtype_name, variable_at
from maxattn.weights.names import Entry

FLOATING = ("float64", "float32", "bfloat16", "float16")
LISTED = 12  # names of one kind that an error lists


def folder(value: Any) -> Path:
    """Return the path of a folder, and refuse what is none."""
    is_path = isinstance(value, str | os.PathLike)
    if is_path and "\0" not in str(value):
        return Path(value)
    shown = printable(str(value), 400) if is_path else _kind(value)
    rule = "it is the path of a folder"
    raise WeightsError("folder", shown, rule, "name the folder to write")


def prefix(value: Any) -> None:
    """Refuse a prefix that is no text."""
    if not isinstance(value, str):
        rule = "it is the text that the tensors' names begin with"
        raise WeightsError("prefix", _kind(value), rule, 'write prefix="", or "transformer."')


def mesh(value: Any) -> None:
    """Refuse a mesh that has no devices to put parameters on."""
    if value is not None and not isinstance(value, jax.sharding.Mesh):
        rule = "it is a jax.sharding.Mesh, whose devices hold the parameters"
        raise WeightsError("mesh", _kind(value), rule, "give config.make_mesh(), or None")


def shard_bytes(value: Any) -> int:
    """Return the bytes of a shard, and refuse what is no whole number above zero."""
    if (size := whole(value, most=sys.maxsize)) is not None:
        return size
    rule = "it is a whole number of bytes, at least 1"
    raise WeightsError("shard_bytes", plain(value), rule, "write 5 * 2**30, or leave it out")


def tensors(value: Any) -> Mapping[str, Any]:
    """Return tensors by name: those of a path, or a state dict as it is."""
    if isinstance(value, str | os.PathLike):
        return files.SafeTensors(Path(value))
    if not isinstance(value, Mapping):
        rule = "it is a folder or file of safetensors, or a state dict: names and their arrays"
        raise WeightsError("tensors", _kind(value), rule, "give the path, or model.state_dict()")
    for name in value:
        if not isinstance(name, str):
            raise WeightsError(
                "tensors", repr(name), "the names of tensors are text", "give a flat state dict"
            )
    return value


def arrays(names: Iterable[str], held: Mapping[str, Any]) -> None:
    """Refuse what has no shape and dtype, or no numbers."""
    for name in names:
        tensor, remedy = held[name], "give arrays by their names, as model.state_dict() has them"
        if not _is_array(tensor):
            kind = type(tensor).__name__
            rule = f"a tensor is an array of numpy, jax or torch, and this is a {kind}"
            raise WeightsError("tensors", name, rule, remedy)
        if why := _has_no_numbers(tensor):
            raise WeightsError("tensors", name, f"a tensor holds numbers, and this {why}", remedy)


def _is_array(tensor: Any) -> bool:
    shape = getattr(tensor, "shape", None)
    is_shape = isinstance(shape, tuple) and all(isinstance(n, int | np.integer) for n in shape)
    return is_shape and hasattr(tensor, "dtype")


def _has_no_numbers(tensor: Any) -> str:
    """Say why an array cannot be read; nothing of one that can."""
    if isinstance(tensor, jax.ShapeDtypeStruct) or getattr(tensor, "is_meta", False):
        return "has a shape alone"
    if is_tracer(tensor):
        return "is traced: call it outside of jit"
    is_array = isinstance(tensor, jax.Array)
    return "was deleted: donated to a function?" if is_array and tensor.is_deleted() else ""


def dtypes(names: Iterable[str], held: Mapping[str, Any]) -> None:
    """Refuse tensors of integers, of 8 bits and the like."""
    wrong = [
        f"{name} is {dtype}"
        for name in names
        if not is_floating(dtype := dtype_name(held[name].dtype))
    ]
    if wrong:
        more = [f"and {len(wrong) - LISTED} more"] if len(wrong) > LISTED else []
        head = f"weights are {', '.join(FLOATING)}"
        rule = "\n          ".join([head, *wrong[:LISTED], *more])
        remedy = "multiply them out and cast them to float32 first"
        remedy = f"give the weights before quantisation, or {remedy}"
        raise WeightsError("weights", f"{len(wrong)} of another dtype", rule, remedy)


def is_floating(dtype: str) -> bool:
    """Say whether weights are read from a dtype; 8 bits mean nothing without their scales."""
    return dtype in FLOATING


def rounded(entry: Entry, numbers: np.ndarray, dtype: Any) -> np.ndarray:
    """Return numbers in the dtype of their parameter.

    Raises:
        WeightsError: a finite one would become infinite.
    """
    if numbers.dtype == dtype:
        return numbers
    if is_floating(numbers.dtype.name) and not _holds(jnp.finfo(numbers.dtype).max, dtype):
        largest = _largest(numbers)
        if not _holds(largest, dtype):
            theirs = dtype_name(numbers.dtype)
            raise _beyond(entry, dtype, f"the {theirs} tensor reaches {float(largest):g}")
    with np.errstate(over="ignore"):  # of what is infinite already
        return numbers.astype(dtype)


def _beyond(entry: Entry, dtype: Any, reached: str) -> WeightsError:
    name, most = np.dtype(dtype).name, float(jnp.finfo(dtype).max)
    rule = f"the parameter is {name}, which ends at {most:g}, and {reached}"
    wider = "float32 or bfloat16" if name == "float16" else "a wider dtype"
    return WeightsError("weights", entry.name, rule, f"build the module with param_dtype {wider}")


def _largest(tensor: np.ndarray) -> np.ndarray:
    """Return the largest finite magnitude, in the dtype of the tensor."""
    if not tensor.size:
        return np.zeros((), tensor.dtype)
    with np.errstate(invalid="ignore"):  # a bfloat16 NaN
        most = np.maximum(tensor.max(), -tensor.min())
    if np.isfinite(most):
        return np.asarray(most)
    return _largest(np.where(np.isfinite(tensor), tensor, 0).astype(tensor.dtype))


def _holds(value: Any, dtype: Any) -> bool:
    """Say whether a finite number is finite once it is rounded to a dtype."""
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(value).astype(dtype)))


def value_at(module: Any, entry: Entry) -> Any:
    """Return the array of a parameter, and refuse a module that has none yet."""
    value = variable_at(module, entry.path).get_value()
    if isinstance(value, jax.ShapeDtypeStruct):
        rule = "its parameters have shapes and no numbers yet, as nnx.eval_shape leaves them"
        raise WeightsError("module", entry.name, rule, "load weights into it first")
    if isinstance(value, jax.Array) and value.is_deleted():
        rule = "its parameters hold numbers, and this one was deleted: donated to a function?"
        raise WeightsError("module", entry.name, rule, "take the parameters that it returned")
    return value


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
