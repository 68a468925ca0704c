"""Refuses arguments, tensors and names that are wrong or do not fit a module."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxattn.config.errors import plain, printable
from maxattn.config.numbers import whole
from maxattn.errors import WeightsError
from maxattn.jax_private.mesh import is_tracer
from maxattn.weights import files
from maxattn.weights.names import Entry, variable_at

log = logging.getLogger("maxattn")

FLOATING = ("float64", "float32", "bfloat16", "float16")
# Variables that a model makes anew where it runs.
TRANSIENT = (nnx.RngState, nnx.Intermediate, nnx.Perturbation, nnx.Cache)
NORMS = {"norm_q", "norm_k", "norm_added_q", "norm_added_k"}  # of queries and keys
LISTED = 12  # most names of one kind in an error


@dataclass(frozen=True)
class Loaded:
    """Names of the tensors that a load could not match.

    Args:
        missing: tensors that the module needs and the file lacks; their parameters did not change.
        unexpected: tensors of the file for which the module has no parameter.
    """

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """List missing and unexpected names, one per line."""
        kinds = {"missing": self.missing, "unexpected": self.unexpected}
        return [f"{kind}: {name}" for kind, names in kinds.items() for name in first_of(names)]


def first_of(names: Sequence[str]) -> list[str]:
    """Return the first names, and how many more there are."""
    more = len(names) - LISTED
    return [*names[:LISTED], *([f"and {more} more"] if more > 0 else [])]


# ---- arguments -----------------------------------------------------------------------------------


def folder(value: Any) -> Path:
    """Return a folder's path; refuse a value that is no path."""
    is_path = isinstance(value, str | os.PathLike)
    if is_path and "\0" not in str(value):
        return Path(value)
    shown = printable(str(value), 400) if is_path else _kind(value)
    raise WeightsError("folder", shown, "it must be the path of a folder", "pass a path")


def prefix(value: Any) -> None:
    """Refuse a prefix that is not a string."""
    if not isinstance(value, str):
        rule = "it must be text, with which the tensors' names begin"
        raise WeightsError("prefix", _kind(value), rule, 'pass prefix="", or "transformer."')


def mesh(value: Any) -> None:
    """Refuse a value that is no `jax.sharding.Mesh`."""
    if value is not None and not isinstance(value, jax.sharding.Mesh):
        rule = "it must be a jax.sharding.Mesh, whose devices get the parameters"
        raise WeightsError("mesh", _kind(value), rule, "pass config.make_mesh(), or None")


def shard_bytes(value: Any) -> int:
    """Return the size of a file; refuse a value that is no whole number above zero."""
    if (size := whole(value, most=sys.maxsize)) is not None:
        return size
    rule = "it must be a whole number of bytes, at least 1"
    raise WeightsError("shard_bytes", plain(value), rule, "write 5 * 2**30, or leave it out")


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


# ---- tensors -------------------------------------------------------------------------------------


def tensors(value: Any) -> Mapping[str, Any]:
    """Return tensors by name, from a path or a state dict."""
    if isinstance(value, str | os.PathLike):
        return files.SafeTensors(Path(value))
    if not isinstance(value, Mapping):
        rule = "it must be a folder or file of safetensors, or a state dict of arrays by name"
        raise WeightsError("tensors", _kind(value), rule, "pass the path, or model.state_dict()")
    for name in value:
        if not isinstance(name, str):
            rule = "the names of tensors must be text"
            raise WeightsError("tensors", repr(name), rule, "pass a flat state dict")
    return value


def arrays(names: Iterable[str], held: Mapping[str, Any]) -> None:
    """Refuse tensors without shape and dtype, or without numbers."""
    for name in names:
        tensor = held[name]
        shape = getattr(tensor, "shape", None)
        is_shape = isinstance(shape, tuple) and all(isinstance(n, int | np.integer) for n in shape)
        if not (is_shape and hasattr(tensor, "dtype")):
            kind = type(tensor).__name__
            rule = f"a tensor must be an array of numpy, jax or torch, and this is a {kind}"
        elif reason := _reason_without_numbers(tensor):
            rule = f"a tensor must have numbers, and this one {reason}"
        else:
            continue
        remedy = "pass arrays by their names, such as model.state_dict()"
        raise WeightsError("tensors", name, rule, remedy)


def value_at(module: Any, entry: Entry) -> Any:
    """Return the array of a parameter; refuse a parameter without values."""
    value = variable_at(module, entry.path).get_value()
    if reason := _reason_without_numbers(value):
        rule = f"its parameters must have numbers, and this one {reason}"
        remedy = "load weights first, or use the arrays that the function with donation returned"
        raise WeightsError("module", entry.name, rule, remedy)
    return value


def _reason_without_numbers(array: Any) -> str:
    """Return why an array cannot be read, "" if it can be."""
    if isinstance(array, jax.ShapeDtypeStruct) or getattr(array, "is_meta", False):
        return "has only a shape"
    if is_tracer(array):
        return "is traced: read it outside of jit"
    is_deleted = isinstance(array, jax.Array) and array.is_deleted()
    return "was deleted, as donated arrays are" if is_deleted else ""


def names(
    wanted: tuple[Entry, ...], held: Mapping[str, Any], result: Loaded, strict: bool, prefix: str
) -> None:
    """Refuse tensors of wrong shapes and, if `strict`, missing or unexpected tensors."""
    shapes = ((e, tuple(held[e.name].shape)) for e in wanted if e.name in held)
    misfits = [(e, got) for e, got in shapes if got != e.shape]
    wrong = [f"{e.name} is {got}, and the module has {e.shape}" for e, got in misfits]
    named = result if strict else Loaded()
    if not strict and result.lines():
        log.warning("weights: %s", "; ".join(result.lines()))
    lines = [*(f"misshapen: {line}" for line in first_of(wrong)), *named.lines()]
    if lines:
        sizes = {"misshapen": wrong, "missing": named.missing, "unexpected": named.unexpected}
        counts = ", ".join(f"{len(names)} {kind}" for kind, names in sizes.items() if names)
        rule = "\n          ".join(["names and shapes must equal the module's", *lines])
        raise WeightsError("weights", counts, rule, _remedy(result, prefix, misfits))


def _remedy(result: Loaded, prefix: str, misfits: list[tuple[Entry, tuple[int, ...]]]) -> str:
    """Suggest the prefix with which the file has the first missing name, or the norm it has."""
    for name in result.missing[:1]:
        bare = name.removeprefix(prefix)
        for other in result.unexpected:
            if other.endswith(f".{bare}"):
                begin = repr(other.removesuffix(bare))
                return f"the names begin with {begin}: pass prefix={begin}"
    for entry, got in misfits:
        if len(got) == 1 and NORMS.intersection(entry.name.split(".")):
            kind = "rms_norm_across_heads" if got > entry.shape else "rms_norm"
            return f"build the module with the weights' sizes, its norms with qk_norm={kind!r}"
    if misfits:
        return "build the module with the weights' sizes"
    return "build the module with the weights' layers, or skip unmatched names with strict=False"


# ---- dtypes --------------------------------------------------------------------------------------


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of numpy, jax or torch."""
    return str(dtype).removeprefix("torch.")


def dtypes(names: Iterable[str], held: Mapping[str, Any]) -> None:
    """Refuse tensors of quantised dtypes (integers, 8 bits), which need scales."""
    kinds = ((name, dtype_name(held[name].dtype)) for name in names)
    if wrong := [f"{name} is {dtype}" for name, dtype in kinds if dtype not in FLOATING]:
        head = f"each dtype must be one of {', '.join(FLOATING)}"
        rule = "\n          ".join([head, *first_of(wrong)])
        remedy = "pass weights that are not quantised, or apply the scales in float32 first"
        raise WeightsError("weights", f"{len(wrong)} of another dtype", rule, remedy)


def rounded(entry: Entry, numbers: np.ndarray, dtype: Any) -> np.ndarray:
    """Cast numbers to their parameter's dtype; refuse a finite number that would overflow."""
    if numbers.dtype == dtype:
        return numbers
    is_floating = numbers.dtype.name in FLOATING
    if is_floating and not _is_finite_in(jnp.finfo(numbers.dtype).max, dtype):
        largest = _largest(numbers)
        if not _is_finite_in(largest, dtype):
            name, most = np.dtype(dtype).name, float(jnp.finfo(dtype).max)
            theirs = f"the {numbers.dtype.name} tensor reaches {float(largest):g}"
            rule = f"the parameter is {name}, whose largest number is {most:g}, and {theirs}"
            wider = {"float16": "float32 or bfloat16", "float32": "float64"}.get(name, "float32")
            remedy = f"build the module with param_dtype {wider}"
            raise WeightsError("weights", entry.name, rule, remedy)
    with np.errstate(over="ignore"):  # infinite numbers stay infinite
        return numbers.astype(dtype)


def _largest(tensor: np.ndarray) -> np.ndarray:
    if not tensor.size:
        return np.zeros((), tensor.dtype)
    with np.errstate(invalid="ignore"):  # a bfloat16 NaN
        most = np.maximum(tensor.max(), -tensor.min())
    if np.isfinite(most):
        return np.asarray(most)
    return _largest(np.where(np.isfinite(tensor), tensor, 0).astype(tensor.dtype))


def _is_finite_in(value: Any, dtype: Any) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(np.asarray(value).astype(dtype)))


def no_lora(module: nnx.Module, every: Mapping[str, Sequence[Entry]]) -> None:
    """Refuse LoRA, which readers of a model's folder would leave out."""
    variables = {name: variable_at(module, parts[0].path) for name, parts in every.items()}
    lora = [n for n, x in variables.items() if ".lora_" in n or isinstance(x, nnx.LoRAParam)]
    if lora:
        rule = "a reader of a model's folder leaves LoRA out, and has the model without it"
        remedy = (
            "write the two parts of to_diffusers(module) by safetensors.numpy.save_file: the names"
            " with .lora_ as a LoRA file, the others as the model"
        )
        if ".lora_" not in lora[0]:
            remedy = "use nnx.LoRA, whose names readers know, or merge the matrices into the kernel"
        found = _of_class(variables[lora[0]], every[lora[0]][0].path)
        more = f" and {len(lora) - 1} more" if lora[1:] else ""
        raise WeightsError("module", found + more, rule, remedy)


def savable(module: nnx.Module, every: Mapping[str, Sequence[Entry]]) -> None:
    """Refuse variables that files do not have, and kernels of whole numbers or 8 bits."""
    other = nnx.All(nnx.Variable, nnx.Not(nnx.Any(nnx.Param, *TRANSIENT)))
    for path, variable in nnx.to_flat_state(nnx.state(module, other)):
        found = _of_class(variable, path)
        rule = "files of models have nnx.Param alone, so its numbers would be lost"
        remedy = "make it an nnx.Param, or an nnx.Cache if a reader computes it"
        if isinstance(variable, nnx.BatchStat):
            rule = "diffusers' models have no BatchNorm, so its running statistics would be lost"
            remedy = "use nnx.GroupNorm, or save the state with orbax"
        raise WeightsError("module", found, rule, remedy)
    for name, parts in every.items():
        variable = variable_at(module, parts[0].path)
        dtype = dtype_name(variable.get_value().dtype)
        if name.endswith(".weight") and dtype not in FLOATING:
            found = f"{_of_class(variable, parts[0].path)}, {dtype}"
            rule = f"a kernel must be one of {', '.join(FLOATING)}: files have no scales for others"
            remedy = "put the product of the kernel and its scales there"
            raise WeightsError("module", found, rule, remedy)


def _of_class(variable: Any, path: Sequence[Any]) -> str:
    return f"{type(variable).__name__} {'.'.join(map(str, path))}"
