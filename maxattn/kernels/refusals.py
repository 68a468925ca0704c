"""Refusals that kernels share: dtypes, head dims, scales, masks and biases."""

from __future__ import annotations

from maxattn.call import Call
from maxattn.errors import Reason
from maxattn.masks.terms import USE_BLOCKWISE, Terms
from maxattn.target import Target

USE_AUTO = "set attention: auto"


def refuse_call(who: str, call: Call, head_limit: int, where: str = "") -> Reason | None:
    """Refuse float32, head dims above the limit (of devices `where`), and scales below 0."""
    if call.dtype == "float32":
        rule = "it takes bfloat16 and float16, and the operands are float32"
        return Reason(who, "dtype float32", rule, f"cast q, k and v to bfloat16, or {USE_AUTO}")
    if call.head_dim > head_limit:
        rule = f"{where and f'on {where} '}it takes head dims up to {head_limit}"
        rule = f"{rule}, and this is {call.head_dim}"
        return Reason(who, f"head dim {call.head_dim}", rule, USE_AUTO)
    if call.scale < 0:  # the libraries take the largest product as the largest score: NaN
        rule = f"it takes scales above 0, and this is {call.scale:.3g}"
        return Reason(who, "scale below 0", rule, f"pass -q with scale {-call.scale:.3g}")
    return None


def refuse_mask(who: str, terms: Terms, rows: bool = False) -> Reason | None:
    """Refuse masks but a band, or with `rows` any interval, with lengths or flags of keys."""
    if terms.rest:
        kind = " and ".join(terms.rest[0].names())
        rule = f"it takes masks of positions and KeyPadding, and {kind} is neither"
        return Reason(who, f"mask {kind}", rule, USE_AUTO)
    if terms.band is None and not rows:
        text = " & ".join(str(m) for m in terms.positions)
        rule = f"it takes Causal and LocalWindow, and not {text}"
        return Reason(who, "mask", rule, USE_AUTO)
    if terms.has_flags and terms.positions:
        rule = (
            "it moves the keys that KeyPadding's flags mark as real to the front, which changes the"
            " positions that the other masks test"
        )
        remedy = f"pass KeyPadding with lengths if real keys come first, or {USE_AUTO}"
        return Reason(who, "mask KeyPadding & positions", rule, remedy)
    return None


def refuse_bias(who: str, call: Call, remedy: str = USE_BLOCKWISE) -> Reason | None:
    return None if call.bias is None else Reason(who, "bias", "it takes no additive bias", remedy)


def refuse_float16(who: str, call: Call, target: Target) -> Reason | None:
    """Refuse float16 in Pallas on a TPU."""
    if target.platform != "tpu" or call.dtype != "float16":
        return None
    rule = "the TPU's compiler cannot compile this kernel in float16"
    return Reason(who, "dtype float16", rule, f"use bfloat16, or {USE_BLOCKWISE}")


def refuse_repeats(who: str) -> Reason:
    rule = "its backward adds gradients up in no fixed order"
    return Reason(who, "deterministic", rule, USE_AUTO)
