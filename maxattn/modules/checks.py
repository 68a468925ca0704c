"""Checks of the modules' settings and operands before anything is traced, one rule per function."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.dtypes import canonicalize_dtype

from maxattn import sharding
from maxattn.call import static_scale
from maxattn.config.numbers import is_number
from maxattn.errors import InputError, MeshError, did_you_mean
from maxattn.jax_private.mesh import is_tracer
from maxattn.masks.operands import DTYPES, check_not_torch, check_values


def positive(setting: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        rule = "it must be an integer of at least 1"
        raise InputError(setting, repr(value), rule, "set it to a positive integer")


def head_counts(heads: int, kv_heads: int) -> None:
    """Refuse head counts if `kv_heads` does not divide `heads`."""
    positive("heads", heads)
    positive("kv_heads", kv_heads)
    if heads % kv_heads:
        rule = f"the {heads} query heads must be a multiple of the key heads"
        remedy = f"use a number of key heads that divides {heads}"
        remedy += "; the channels of a head are dim_head="
        raise InputError("kv_heads", kv_heads, rule, remedy)


def dropout_rate(rate: float) -> None:
    if not is_number(rate) or not 0.0 <= rate < 1.0:
        rule = "it must be at least 0 and below 1"
        raise InputError("dropout", repr(rate), rule, "use 0.0 for no dropout")


def epsilon(eps: float) -> None:
    if not is_number(eps) or not 0.0 < eps < inf:
        rule = "it must be positive and finite, so that the norm of a zero vector is finite"
        raise InputError("eps", repr(eps), rule, "use 1e-6 or so")


def scale(value: Any) -> float | None:
    """Return a scale as a number; refuse one that `attention` would refuse in a call."""
    return None if value is None else static_scale(value, 1)


def mesh(value: Any) -> None:
    if isinstance(value, Mapping):
        rule = "a module needs a mesh of devices; a dict of sizes is for plan() alone"
        raise MeshError("mesh", dict(value), rule, "pass config.make_mesh()")
    sharding.check_mesh(value)


def flag(setting: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InputError(setting, repr(value), "it must be True or False", f"pass {setting}=True")


def channels_of_heads(out_dim: Any, channels: int) -> None:
    """Refuse an `out_dim` other than the heads' channels if there is no output projection."""
    if out_dim is not None and out_dim != channels:
        rule = f"without an output projection the output has the {channels} channels of all heads"
        raise InputError("out_dim", out_dim, rule, "leave out_dim out, or pass out_proj=True")


def optional_name(setting: str, value: Any, names: tuple[str, ...]) -> None:
    """Refuse a value that is neither None nor one of the names."""
    if value is not None and value not in names:
        remedy = did_you_mean(str(value), names) or f"use None for no {setting}"
        if value is True:
            remedy = f"write {setting}={names[0]!r}, or another of them"
        rule = f"it must be None or one of {', '.join(names)}"
        raise InputError(setting, repr(value), rule, remedy)


def role(value: Any) -> None:
    if value not in ("self", "cross"):
        remedy = "use 'self', or 'cross' if the keys are of another sequence"
        raise InputError("role", repr(value), "it must be 'self' or 'cross'", remedy)


def dtype(setting: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    try:
        # numpy would read None as float64.
        name = "None" if value is None else jnp.dtype(value).name
    except TypeError:
        name = repr(value)
    if name not in DTYPES:
        rule = f"dtype must be one of {', '.join(DTYPES)}"
        raise InputError(setting, name, rule, f"set {setting}=jnp.float32")


def computation_dtype(value: Any) -> None:
    """Refuse a dtype in which no kernel computes, of a module that another library built."""
    if (name := canonicalize_dtype(value).name) not in DTYPES:
        rule = f"the module attends in this dtype, which must be one of {', '.join(DTYPES)}"
        raise InputError("dtype", name, rule, "build the module with dtype=jnp.float32")


def precision(value: Any) -> None:
    if value is None:
        return
    x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    try:
        jax.eval_shape(lambda a, b: jax.lax.dot(a, b, precision=value), x, x)
    except (TypeError, ValueError) as error:
        rule = "it must be None, 'default', 'high', 'highest', or another precision of jax.lax.dot"
        remedy = "use None, or jax.lax.Precision.HIGHEST"
        raise InputError("precision", repr(value), rule, remedy) from error


def parameter_rngs(rngs: Any) -> None:
    if not isinstance(rngs, nnx.Rngs):
        rule = "the initial parameters are drawn from an nnx.Rngs"
        raise InputError("rngs", repr(rngs), rule, "pass nnx.Rngs(0)")
    if not _has_stream(rngs, "params"):
        rule = "the initial parameters are drawn from the stream 'params' or 'default'"
        remedy = "pass nnx.Rngs(0), or nnx.Rngs(params=0, ...)"
        raise InputError("rngs", _streams(rngs), rule, remedy)


def _has_stream(rngs: nnx.Rngs, name: str) -> bool:
    return hasattr(rngs, name) or hasattr(rngs, "default")


def _streams(rngs: nnx.Rngs) -> str:
    names = [name for name in vars(rngs) if not name.startswith("_")]
    return f"nnx.Rngs of {', '.join(names) or 'nothing'}"


def described(x: Any) -> str:
    """Return the shape of an array, or the type of another value, for an error."""
    shape = getattr(x, "shape", None)
    if shape is not None:
        return f"shape {tuple(shape)}"
    return "None" if x is None else type(x).__name__


def rank_3(name: str, x: Any) -> None:
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) != 3:
        remedy = "add or fold axes until there are three"
        raise InputError(name, described(x), "it must be an array [B, T, channels]", remedy)
    check_values(name, x)


def states(name: str, x: Any, width: int, width_name: str, batch: int | None = None) -> None:
    """Refuse states without `batch` rows, or without the channels that `width_name` set."""
    rank_3(name, x)
    check_not_torch(name, dtype := str(x.dtype))
    if dtype not in DTYPES:
        rule = f"dtype must be one of {', '.join(DTYPES)}"
        raise InputError(name, dtype, rule, f"cast it: {name}.astype(jnp.float32)")
    found, last = f"shape {tuple(x.shape)}", x.shape[-1]
    if last != width:
        build = f"build the module with {width_name}={last}"
        remedy = f"pass states of {width} channels, or {build}"
        raise InputError(name, found, f"its last axis must be {width_name}={width}", remedy)
    if batch is not None and x.shape[0] != batch:
        rule = f"its batch must be that of hidden_states, {batch}"
        raise InputError(name, found, rule, "give both the same batch size")


def dropout_rngs(dropout: nnx.Dropout, deterministic: bool | None, rngs: Any) -> None:
    """Refuse random dropout without a source of randomness, and a mode that is no known bool."""
    is_bool = str(getattr(deterministic, "dtype", type(deterministic).__name__)) == "bool"
    if deterministic is not None and (is_tracer(deterministic) or not is_bool):
        value = "traced" if is_tracer(deterministic) else repr(deterministic)
        rule = "it must be True, False or None, known before tracing"
        remedy = "make it a static argument of jit, or call module.eval() and leave it out"
        raise InputError("deterministic", value, rule, remedy)
    off = dropout.deterministic if deterministic is None else deterministic
    if off or dropout.rate == 0.0 or (rngs is None and dropout.rngs is not None):
        return
    by_train = deterministic is None
    when = "unless eval() was called" if by_train else "with deterministic=False"
    why = f"dropout={dropout.rate} {when}"
    off_by = "call eval()" if by_train else "deterministic=True"
    remedy = f"pass rngs=nnx.Rngs(dropout=seed), or {off_by}"
    if not isinstance(rngs, nnx.Rngs | nnx.RngStream | jax.Array):
        raise InputError("rngs", repr(rngs), f"{why} draws random numbers", remedy)
    if isinstance(rngs, nnx.Rngs) and not _has_stream(rngs, dropout.rng_collection):
        rule = f"{why} draws from the stream '{dropout.rng_collection}' or 'default'"
        raise InputError("rngs", _streams(rngs), rule, remedy)
