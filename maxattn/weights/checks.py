"""Refuses arguments, tensors and names that are wrong or do not fit a module; changes nothing."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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

log = logging.getLogger("maxattn")

FLOATING = ("float64", "float32", "bfloat16", "float16")
LISTED = 12  # names of one kind that an error lists


@dataclass(frozen=True)
class Loaded:
    """The names that a load left out.

    Args:
        missing: tensors that the module needs and the file lacks; their parameters are as they
            were.
        unexpected: tensors of the file that the module has no parameter for.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """List both, a line each."""
        return _listed("missing", self.missing) + _listed("unexpected", self.unexpected)


def folder(value: Any) -> Path:
    """Return the path of a folder, and refuse what is none."""
    is_path = isinstance(value, str | os.PathLike)
    if is_path and "\0" not in str(value):
        return Path(value)
    shown = printable(str(value), 400) if is_path else _kind(value)
    raise WeightsError("folder", shown, "it is the path of a folder", "name the folder to write")


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
            rule = "the names of tensors are text"
            raise WeightsError("tensors", repr(name), rule, "give a flat state dict")
    return value


def arrays(names: Iterable[str], held: Mapping[str, Any]) -> None:
    """Refuse tensors without shape and dtype, or without numbers."""
    for name in names:
        tensor = held[name]
        shape = getattr(tensor, "shape", None)
        is_shape = isinstance(shape, tuple) and all(isinstance(n, int | np.integer) for n in shape)
        if not (is_shape and hasattr(tensor, "dtype")):
            kind = type(tensor).__name__
            rule = f"a tensor is an array of numpy, jax or torch, and this is a {kind}"
        elif why := _has_no_numbers(tensor):
            rule = f"a tensor holds numbers, and this {why}"
        else:
            continue
        remedy = "give arrays by their names, as model.state_dict() has them"
        raise WeightsError("tensors", name, rule, remedy)


def _has_no_numbers(tensor: Any) -> str:
    """Return why an array cannot be read, "" if it can."""
    if isinstance(tensor, jax.ShapeDtypeStruct) or getattr(tensor, "is_meta", False):
        return "has a shape alone"
    if is_tracer(tensor):
        return "is traced: call it outside of jit"
    is_array = isinstance(tensor, jax.Array)
    return "was deleted: donated to a function?" if is_array and tensor.is_deleted() else ""


def names(
    wanted: tuple[Entry, ...], held: Mapping[str, Any], result: Loaded, strict: bool, prefix: str
) -> None:
    """Refuse tensors of other shapes, and missing or unexpected ones if `strict`, else log these.

    Raises:
        WeightsError: naming all of them.
    """
    shapes = ((e, tuple(held[e.name].shape)) for e in wanted if e.name in held)
    wrong = [
        f"{e.name} is {got}, and the module has {e.shape}" for e, got in shapes if got != e.shape
    ]
    named = result if strict else Loaded()
    if not strict and result.lines():
        log.warning("weights: %s", "; ".join(result.lines()))
    lines = [*_listed("misshapen", tuple(wrong)), *named.lines()]
    if lines:
        sizes = {"misshapen": wrong, "missing": named.missing, "unexpected": named.unexpected}
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in sizes.items() if names)
        rule = "\n          ".join(["names and shapes must be the module's", *lines])
        raise WeightsError("weights", counts, rule, _remedy(result, prefix))


def _listed(kind: str, names: tuple[str, ...]) -> list[str]:
    more = [f"{kind}: and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return [f"{kind}: {name}" for name in names[:LISTED]] + more


def _remedy(result: Loaded, prefix: str) -> str:
    """Return the prefix that the names need, if there is one."""
    for name in result.missing[:1]:
        bare = name.removeprefix(prefix)
        for other in result.unexpected:
            if other.endswith(f".{bare}"):
                begin = repr(other.removesuffix(bare))
                return f"the names begin with {begin}: pass prefix={begin}"
    return "build the module with the sizes of the weights; strict=False loads what fits by name"


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
    """Whether weights are read from a dtype; 8 bits mean nothing without their scales."""
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
            name, most = np.dtype(dtype).name, float(jnp.finfo(dtype).max)
            theirs = f"the {numbers.dtype.name} tensor reaches {float(largest):g}"
            rule = f"the parameter is {name}, which ends at {most:g}, and {theirs}"
            wider = "float32 or bfloat16" if name == "float16" else "a wider dtype"
            remedy = f"build the module with param_dtype {wider}"
            raise WeightsError("weights", entry.name, rule, remedy)
    with np.errstate(over="ignore"):  # of what is infinite already
        return numbers.astype(dtype)


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
    """Whether a finite number is finite once it is rounded to a dtype."""
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
