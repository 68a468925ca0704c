"""Refuses what is no module, no tensors or no weights; it changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.errors import WeightsError
from maxattn.weights import files
from maxattn.weights.access import dtype_name, on_host, variable_at
from maxattn.weights.names import Entry

FLOATING = ("float64", "float32", "bfloat16", "float16")
LISTED = 12  # names of one kind that an error lists


def folder(value: Any) -> Path:
    """Return the path of a folder, and refuse what is none."""
    if isinstance(value, str | os.PathLike) and not isinstance(value, bytes):
        return Path(value)
    raise WeightsError(
        "folder", _kind(value), "it is the path of a folder", "name the folder to write"
    )


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
    """Refuse what has no shape and dtype."""
    for name in names:
        tensor = held[name]
        if not hasattr(tensor, "shape") or not hasattr(tensor, "dtype"):
            rule = (
                "a tensor is an array of numpy, jax or torch, and this is a"
                f" {type(tensor).__name__}"
            )
            raise WeightsError(
                "tensors", name, rule, "give arrays by their names, as model.state_dict() has them"
            )


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


def overflow(entries: Iterable[tuple[Entry, Any]], held: Mapping[str, Any]) -> None:
    """Refuse numbers that would become infinite in the narrower dtype of their parameter.

    Args:
        entries: each with the dtype of its parameter.
        held: the tensors; those with more exponent bits than the parameter's dtype are read, one at
            a time.
    """
    for entry, dtype in entries:
        theirs = dtype_name(held[entry.name].dtype)
        if jnp.finfo(theirs).maxexp > jnp.finfo(dtype).maxexp:
            largest = _largest(on_host(held[entry.name], (slice(None),) * len(entry.shape)))
            if not np.isfinite(_cast(largest, dtype)):
                raise _beyond(entry, dtype, f"the {theirs} tensor reaches {largest:g}")


def _beyond(entry: Entry, dtype: Any, reached: str) -> WeightsError:
    name, most = np.dtype(dtype).name, float(jnp.finfo(dtype).max)
    rule = f"the parameter is {name}, which ends at {most:g}, and {reached}"
    wider = "float32 or bfloat16" if name == "float16" else "a wider dtype"
    return WeightsError("weights", entry.name, rule, f"build the module with param_dtype {wider}")


def _largest(tensor: np.ndarray) -> float:
    """Return the largest finite magnitude."""
    sizes = np.abs(tensor[np.isfinite(tensor)])
    return float(sizes.max()) if sizes.size else 0.0


def _cast(value: float, dtype: Any) -> float:
    with np.errstate(over="ignore"):
        return float(np.float64(value).astype(dtype))


def value_at(module: Any, entry: Entry) -> Any:
    """Return the array of a parameter, and refuse a module that has none yet."""
    value = variable_at(module, entry.path).get_value()
    if isinstance(value, jax.ShapeDtypeStruct):
        rule = "its parameters have shapes and no numbers yet, as nnx.eval_shape leaves them"
        raise WeightsError("module", entry.name, rule, "load weights into it first")
    return value


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__
