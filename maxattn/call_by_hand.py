"""The fields of a `Call` that was made by hand, checked and brought to what `Call.of` makes."""

from __future__ import annotations

from operator import index
from typing import Any

import jax

from maxattn.call import Call, check_dtype, check_heads, is_number, static_scale
from maxattn.errors import InputError, brief
from maxattn.masks import Mask

SIZES = ("batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim")


def checked_fields(call: Call) -> dict[str, Any]:
    """Return the fields of a call that was made by hand, as `Call.of` would have made them.

    Raises:
        InputError: as `Call.of`.
    """
    found = {name: _size(name, getattr(call, name)) for name in SIZES}
    b, t, s, n, kv_heads, h = found.values()
    check_heads(n, kv_heads)
    check_dtype("dtype", call.dtype if isinstance(call.dtype, str) else repr(call.dtype))
    _check_choice("role", call.role, ("self", "cross"))
    for name in ("return_lse", "sharded"):
        _check_choice(name, getattr(call, name), (False, True))
    scale = None if is_number(call.scale) and call.scale == 0 else call.scale
    found |= {"scale": static_scale(scale, h), "sequence": _sequence(call.sequence)}
    full = None if call.sharded else (b, t, s, n)
    return found | {"mask": _form(call.mask, full), "bias": _bias_of(call.bias, full)}


def _size(name: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else index(value)
    except (TypeError, jax.errors.JAXTypeError):
        number = 0
    if number < 1:
        rule, remedy = "every size is a whole number, at least 1", "Call.of(q, k) reads them off"
        raise InputError(name, brief(value), rule, remedy)
    return number


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if not any(type(value) is type(x) and value == x for x in known):
        rule = f"one of {', '.join(map(repr, known))}"
        raise InputError(name, brief(value), rule, f"write {known[0]!r}, or leave it out")


def _sequence(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, tuple) or len(value) != 2:
        raise InputError("sequence", brief(value), "it is (T, S), or None", "leave it out")
    return _size("sequence", value[0]), _size("sequence", value[1])


def _form(mask: Any, full: tuple[int, ...] | None) -> Mask:
    """Bind a mask, and drop its arrays; that of a share (`full` is None) is bound already."""
    if not isinstance(mask, Mask):
        rule, remedy = "a call holds a mask of maxattn.masks", "say a table as masks.Dense(table)"
        raise InputError("mask", type(mask).__name__, rule, remedy)
    if full is not None:
        b, t, s, n = full
        return mask.bind(t, s, b, n).form()
    if not mask.is_bound:
        rule = "the mask of a share knows where its queries are"
        raise InputError("mask", mask, rule, "call bind(q_len, kv_len) with the whole lengths")
    return mask.form()


def _bias_of(bias: Any, full: tuple[int, ...] | None) -> tuple[int, int, int, int] | None:
    if bias is None:
        return None
    if not isinstance(bias, tuple | list) or len(bias) != 4:
        rule, remedy = "it is the shape of a bias, four sizes", "give bias.shape of [B, N, T, S]"
        raise InputError("bias", brief(bias), rule, remedy)
    b, n, t, s = (_size("bias", x) for x in bias)
    sizes = (b, n, t, s) if full is None else (full[0], full[3], *full[1:3])
    if any(x not in (1, y) for x, y in zip((b, n, t, s), sizes, strict=True)):
        rule = f"each size must be 1 or that of [B, N, T, S], {sizes}"
        raise InputError("bias", (b, n, t, s), rule, "let an axis broadcast, or give it whole")
    return b, n, t, s
