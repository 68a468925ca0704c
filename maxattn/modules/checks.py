"""What the modules refuse before anything is traced: one rule a function. It computes nothing."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from maxattn.errors import InputError
from maxattn.plan import checked_config

DTYPES = ("float32", "bfloat16", "float16")


def positive(setting: str, value: Any) -> None:
    """Refuse anything but an integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(setting, repr(value), "it must be an integer of at least 1", "set it to a positive integer")


def head_counts(heads: int, kv_heads: int) -> None:
    """Refuse key heads that cannot be shared equally by the query heads."""
    positive("heads", heads)
    positive("kv_heads", kv_heads)
    if heads % kv_heads:
        raise InputError(
            "kv_heads", kv_heads, f"the {heads} query heads must be a multiple of the key heads",
            f"use a number of key heads that divides {heads}",
        )  # fmt: skip


def dropout_rate(rate: float) -> None:
    """Refuse a probability that is not in [0, 1)."""
    if not 0.0 <= rate < 1.0:
        raise InputError("dropout", rate, "it is a probability, at least 0 and below 1", "use 0.0 for no dropout")


def epsilon(eps: float) -> None:
    """Refuse an epsilon that would not keep a norm finite."""
    if not eps > 0.0:
        raise InputError("eps", eps, "it must be positive, so that a row of zeros has a finite norm", "use 1e-6 or so")


def dtype(setting: str, value: Any, *, optional: bool = False) -> None:
    """Refuse a dtype that no kernel computes in."""
    if optional and value is None:
        return
    name = jnp.dtype(value).name
    if name not in DTYPES:
        raise InputError(setting, name, f"dtype must be one of {', '.join(DTYPES)}", f"set {setting}=jnp.float32")


def config(value: Any) -> None:
    """Refuse a config that has not been read and checked."""
    checked_config(value)


def rank_3(name: str, x: Any) -> None:
    """Refuse anything but an array [B, T, channels]."""
    shape = getattr(x, "shape", None)
    if shape is None or len(shape) != 3:
        found = type(x).__name__ if shape is None else f"shape {tuple(shape)}"
        raise InputError(name, found, "it must be an array [B, T, channels]", "add or fold axes until there are three")


def states(name: str, x: Any, width: int, width_name: str, batch: int | None = None) -> None:
    """Refuse hidden states that the projections cannot take.

    Args:
        name: of the argument.
        x: the array.
        width: channels that the module was built for.
        width_name: the constructor argument that set them.
        batch: what the batch must be, when something else fixed it.
    """
    rank_3(name, x)
    if x.dtype.name not in DTYPES:
        raise InputError(
            name, x.dtype.name, f"dtype must be one of {', '.join(DTYPES)}", f"cast it: {name}.astype(jnp.float32)"
        )
    if x.shape[-1] != width:
        raise InputError(
            name, f"shape {tuple(x.shape)}", f"its last axis must be {width_name}={width}",
            f"pass states of {width} channels, or build the module with {width_name}={x.shape[-1]}",
        )  # fmt: skip
    if batch is not None and x.shape[0] != batch:
        raise InputError(
            name, f"shape {tuple(x.shape)}", f"its batch must be that of hidden_states, {batch}",
            "give both one batch size",
        )  # fmt: skip


def dropout_rngs(rate: float, deterministic: bool, rngs: Any) -> None:
    """Refuse random dropout without a source of randomness."""
    if rate > 0.0 and not deterministic and rngs is None:
        raise InputError(
            "rngs", None, f"dropout={rate} with deterministic=False draws random numbers",
            "pass rngs=nnx.Rngs(dropout=seed), or deterministic=True",
        )  # fmt: skip
