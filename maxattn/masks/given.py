"""What a caller gives as a mask, made a bound mask: a mask, a boolean array, or None."""

from __future__ import annotations

from typing import Any

from maxattn.errors import InputError
from maxattn.masks.algebra import Full
from maxattn.masks.base import Mask
from maxattn.masks.data import Dense
from maxattn.masks.foreign import check_not_torch


def bind_mask(mask: Any, q: Any, k: Any, *, mask_padding: bool = True) -> Mask:
    """Turn what a caller gave as a mask into a bound mask.

    Raises:
        InputError: neither a mask nor an array, or one that does not fit.
    """
    (b, t, n, _), s = q.shape, k.shape[1]
    bound = as_mask(mask, q, k).bind(t, s, b, n)
    return bound if mask_padding else without_padding(bound)


def without_padding(mask: Mask) -> Mask:
    """Drop the caller's key padding, as `mask_padding_tokens: false` asks."""
    kept = (term for term in mask.terms() if not term.is_key_padding)
    full: Mask = Full()
    for term in kept:
        full = full & term
    return full


def as_mask(mask: Any, q: Any, k: Any) -> Mask:
    """Return a mask as it is, None as `Full`, and a boolean array as `Dense`.

    Raises:
        InputError: neither a mask nor an array, or an array that looks like flags of keys.
    """
    if mask is None:
        return Full()
    if isinstance(mask, Mask):
        return mask
    if not (hasattr(mask, "shape") and hasattr(mask, "dtype")):
        found = repr(mask) if isinstance(mask, str | bool) else type(mask).__name__
        rule = "a mask is a mask of maxattn.masks or a boolean array"
        remedy = "write for example masks.Causal() or masks.KeyPadding(lengths)"
        raise InputError("mask", found, rule, remedy)
    check_not_torch("mask", str(mask.dtype))
    _check_not_flags(tuple(mask.shape), q.shape[0], q.shape[1], k.shape[1])
    return Dense(mask)


def _check_not_flags(shape: tuple[int, ...], b: int, t: int, s: int) -> None:
    """Refuse an array of two axes that is, or may be, flags of each example's keys.

    One row means the same either way.
    """
    if shape != (b, s) or b == 1:
        return
    rule, remedy = (
        "an array of two axes is [T, S], and this looks like [B, S]",
        "say masks.KeyPadding(mask) for keys that are padding",
    )
    if b == t:
        rule = f"an array of two axes is [T, S], and with B = T = {b} this may be [B, S]"
        remedy = "write mask[None] for [T, S]; masks.KeyPadding(mask) for [B, S], True = a real key"
    raise InputError("mask", f"shape {shape}", rule, remedy)
