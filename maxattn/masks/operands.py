"""Checks of queries, keys, values and biases: ranks, sizes and dtypes that fit together."""

from __future__ import annotations

from typing import Any

from maxattn.errors import InputError
from maxattn.masks.foreign import check_not_torch

DTYPES = ("float32", "bfloat16", "float16")


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check_operands(q: Any, k: Any, v: Any = None) -> None:
    """Refuse queries, keys and values whose ranks, sizes or dtypes do not fit together.

    Raises:
        InputError: naming the operand, what it is, and the rule.
    """
    _check_one("q", q, "[B, T, N, H]")
    _check_one("k", k, "[B, S, K, H]")
    if v is not None:
        _check_one("v", v, "[B, S, K, V]")
    _check_sizes(q.shape, k.shape)
    if v is not None and tuple(v.shape[:3]) != tuple(k.shape[:3]):
        rule = f"batch, tokens and heads of v must be those of k, {tuple(k.shape[:3])}"
        remedy = "pass k and v of one shape; the last axis of v may differ"
        raise InputError("v", tuple(v.shape), rule, remedy)
    check_dtypes(q, k, v)


def _check_sizes(q: Any, k: Any) -> None:
    (b, _, n, h), (kb, _, kn, kh) = q, k
    if kb != b:
        rule = f"q has batch {b}, and both must be equal"
        raise InputError("k", f"batch {kb}", rule, "give q, k and v one batch size")
    if kh != h:
        rule = f"q has head dim {h}, and both must be equal"
        raise InputError("k", f"head dim {kh}", rule, "project both to one size")
    check_heads(n, kn)


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuse query heads that the key heads cannot share.

    Raises:
        InputError: naming both.
    """
    if heads % kv_heads:
        rule = f"the {heads} query heads must be a multiple of the key heads"
        remedy = f"use a number of key heads that divides {heads}"
        raise InputError("kv_heads", kv_heads, rule, remedy)


def check_dtypes(q: Any, k: Any, v: Any = None) -> None:
    """Refuse a dtype that no kernel computes in, and several dtypes.

    Raises:
        InputError: naming them.
    """
    dtypes = {n: str(x.dtype) for n, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    for name, dtype in dtypes.items():
        check_dtype(name, dtype)
    if len(set(dtypes.values())) > 1:
        rule, remedy = "q, k and v must have one dtype", "cast them to one before the call"
        raise InputError("dtype", ", ".join(dtypes.values()), rule, remedy)


def check_dtype(name: str, dtype: str) -> None:
    """Refuse a dtype that no kernel computes in.

    Raises:
        InputError: naming it.
    """
    check_not_torch(name, dtype)
    if dtype not in DTYPES:
        rule, remedy = f"dtype must be one of {', '.join(DTYPES)}", f"{name}.astype(jnp.float32)"
        raise InputError(name, dtype, rule, f"cast it, e.g. {remedy}")


def _check_one(name: str, x: Any, axes: str) -> None:
    if not _is_array(x):
        found = "None" if x is None else type(x).__name__
        raise InputError(name, found, f"{name} must be an array {axes}", f"pass {name} as one")
    if refused := _refused_shape(name, tuple(x.shape), axes):
        raise InputError(name, f"shape {tuple(x.shape)}", *refused)


def _refused_shape(name: str, shape: tuple[Any, ...], axes: str) -> tuple[str, str] | None:
    """Return the rule that a shape breaks, and the remedy."""
    if len(shape) != 4:
        split = "split the heads first, e.g. with maxattn.modules.split_heads(x, heads)"
        return f"{name} must be {axes}, four axes", split
    if not all(isinstance(size, int) for size in shape):
        rule = "every size must be a number, since kernels are chosen by them"
        return rule, "export or trace with fixed shapes"
    if 0 in shape:
        return "every size must be at least 1", "skip the call when there is nothing to attend"
    return None


def bias_shape(bias: Any, full: tuple[int, int, int, int]) -> tuple[int, int, int, int] | None:
    """Return the four sizes of a bias, each 1 or full.

    Raises:
        InputError: it does not broadcast, or has another dtype.
    """
    if bias is None:
        return None
    if not _is_array(bias):
        rule = f"it is an array that broadcasts to [B, N, T, S] = {full}"
        remedy = "pass an array; a mask goes to mask="
        raise InputError("bias", type(bias).__name__, rule, remedy)
    shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
    if len(shape) != 4 or any(x not in (1, f) for x, f in zip(shape, full, strict=True)):
        found, remedy = f"shape {tuple(bias.shape)}", "give every axis its full size or 1"
        raise InputError("bias", found, f"it must broadcast to [B, N, T, S] = {full}", remedy)
    check_not_torch("bias", str(bias.dtype))
    check_bias_dtype(str(bias.dtype))
    return shape  # type: ignore[return-value]


def check_bias_dtype(dtype: str) -> None:
    """Refuse a bias that is not floating.

    Raises:
        InputError: naming its dtype.
    """
    if dtype in DTYPES:
        return
    rule = "a bias is additive and floating: float32, bfloat16 or float16"
    to_mask = "a boolean mask goes to mask=, as masks.Dense(mask)"
    remedy = to_mask if dtype == "bool" else "cast it, e.g. to float32"
    raise InputError("bias", dtype, rule, remedy)
