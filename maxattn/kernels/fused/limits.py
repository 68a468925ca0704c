"""Limits of cuDNN, called by jax or TransformerEngine: GPUs, head dims, masks and biases.

Source: NVIDIA cudnn-frontend 1.23, the checks of its forward and backward, `set_bias` and
`set_dbias`; jax 0.12 for compute capability 10.3; TransformerEngine 2.20 for the bias shapes whose
gradient cuDNN sums.
"""

from __future__ import annotations

from math import prod

import jax
import numpy as np

from maxattn.call import Call
from maxattn.devices import Device
from maxattn.errors import Reason
from maxattn.jax_private.versions import CUDNN, numbers
from maxattn.kernels.base import USE_AUTO, refuse_call, refuse_mask
from maxattn.masks.band_pieces import MOST_SHIFTS, fits_shards, pieces
from maxattn.masks.terms import Terms, sort_terms
from maxattn.target import Target

LEAST_CAPABILITY = (8, 0)
# Only on compute capability 9.x does the backward take head dims above 128.
HOPPER, HEAD_LIMIT, HOPPER_HEAD_LIMIT = 9, 128, 256
LEAST_CUDNN = {(10, 3): "9.11"}  # by compute capability
LEAST_CUDNN_FOR_BIAS = "9.18"
BIAS_HEAD_LIMIT = 128
MOST_WRITTEN = 8 * 2**30  # most bytes of a bias that is broadcast to a larger array


def refuse(who: str, call: Call, target: Target, ends_at_query: bool = False) -> Reason | None:
    """Return why cuDNN cannot compute a call, or None.

    With a bias, cuDNN takes every mask, since hidden pairs are written into the bias. With
    `ends_at_query`, a window must end at its query, and query 0 must have the position of key 0.
    """
    most = head_limit(target.device)
    where = "" if most == HOPPER_HEAD_LIMIT else _named(target)
    reason = _refuse_device(who, target) or refuse_call(who, call, most, where)
    if reason is not None:
        return reason
    if call.q_len == call.kv_len == 1:
        return Reason(who, "length", "it cannot compute one query and one key", USE_AUTO)
    if call.bias is not None:
        return _refuse_bias(who, call, target)
    terms = sort_terms(call.mask)
    return (
        refuse_mask(who, terms)
        or _refuse_shards(who, terms, call)
        or _refuse_window(who, terms, call, ends_at_query)
    )


# ---- GPUs ----------------------------------------------------------------------------------------


def version(target: Target) -> str | None:
    """Return the version of a target's pip package of cuDNN, or None if it is unknown."""
    return next((v for v in map(target.version, CUDNN) if v is not None), None)


def head_limit(device: Device) -> int:
    """Return the largest head dim that cuDNN's forward and backward both take on a GPU."""
    capability = device.capability
    return HOPPER_HEAD_LIMIT if capability and capability[0] == HOPPER else HEAD_LIMIT


def _refuse_device(who: str, target: Target) -> Reason | None:
    capability = target.device.capability
    if capability is None:
        return None
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        has = target.device.capability_text
        rule = f"it needs compute capability {least} or newer, and {target.device_kind} has {has}"
        return Reason(who, "device", rule, USE_AUTO)
    if (least := LEAST_CUDNN.get(capability)) and (there := _older(target, least)):
        rule = f"on {_named(target)} it needs cuDNN {least} or newer, and this is {there}"
        return Reason(who, "version", rule, f"install a newer cuDNN, or {USE_AUTO}")
    return None


def _older(target: Target, least: str) -> str | None:
    """Return the version of cuDNN if it is older than `least`; None if newer or unknown."""
    there = version(target) or ""
    return there if numbers(there) and numbers(there) < numbers(least) else None


def _named(target: Target) -> str:
    text = target.device.capability_text
    return f"compute capability {text}" if text else target.device_kind


# ---- masks ---------------------------------------------------------------------------------------


def _refuse_shards(who: str, terms: Terms, call: Call) -> Reason | None:
    if not call.sharded or fits_shards(terms, call.q_len, call.kv_len):
        return None
    what = terms.positions[0]
    has = f"a device has {call.q_len} queries and {call.kv_len} keys"
    rule = f"for {what} on shards it needs as many queries as keys, and {has}"
    if call.q_len == call.kv_len:
        rule = f"{what} may reach over at most {MOST_SHIFTS - 2} shards, and {has}"
    over = "" if call.role == "cross" else "set context_parallel: ring or ulysses, or "
    return Reason(who, f"mask {what}", rule, f"{over}{USE_AUTO}")


def _refuse_window(who: str, terms: Terms, call: Call, ends_at_query: bool) -> Reason | None:
    band = terms.band
    assert band is not None
    if band.left is None:
        return None
    found = pieces(band, band.offset, call.q_len, call.kv_len)
    mask, windows = terms.positions[0], [p for p in found if p.left is not None]
    if call.sharded:
        rule = "a window needs every token on one device, and this sequence is sharded"
    elif more := [p for p in windows if p.q1 - p.q0 > p.k1 - p.k0]:
        has = f"{more[0].q1 - more[0].q0} queries and {more[0].k1 - more[0].k0} keys"
        rule = f"a window needs at least as many keys as queries, and this one has {has}"
    elif ends_at_query and any(p.right != 0 for p in windows):
        rule = f"a window must end at its query, with query 0 at key 0, and this one is {mask}"
    else:
        return None
    return Reason(who, f"mask {mask}", rule, USE_AUTO)


# ---- biases --------------------------------------------------------------------------------------


def _refuse_bias(who: str, call: Call, target: Target) -> Reason | None:
    if call.bias_dtype != call.dtype:
        rule = f"the bias must have the dtype of q, {call.dtype}, and this one is {call.bias_dtype}"
        remedy = f"pass bias.astype(q.dtype), or {USE_AUTO}"
        return Reason(who, f"bias {call.bias_dtype}", rule, remedy)
    if (reason := refuse_head_dim(who, call)) is not None:
        return reason
    if there := _older(target, LEAST_CUDNN_FOR_BIAS):
        rule = f"for a bias it needs cuDNN {LEAST_CUDNN_FOR_BIAS} or newer, and this is {there}"
        return Reason(who, "bias", rule, f"install a newer cuDNN, or {USE_AUTO}")
    return refuse_size(who, call)


def refuse_head_dim(who: str, call: Call) -> Reason | None:
    """Refuse head dims for which a bias was not tested."""
    if call.head_dim <= BIAS_HEAD_LIMIT:
        return None
    rule = f"it takes a bias at head dims up to {BIAS_HEAD_LIMIT}, and this is {call.head_dim}"
    return Reason(who, f"bias at head dim {call.head_dim}", rule, USE_AUTO)


def refuse_size(who: str, call: Call) -> Reason | None:
    """Refuse to broadcast a bias, or a mask of batch rows, to an array above `MOST_WRITTEN`."""
    assert call.bias is not None
    written = written_shape(call)
    full = (call.batch, call.heads, call.q_len, call.kv_len)
    own = tuple(1 if x == 1 else n for x, n in zip(call.bias, full, strict=True))
    if written == own or _bytes(written, call.bias_dtype) <= MOST_WRITTEN:
        return None
    rule = (
        f"it broadcasts a bias to at most {MOST_WRITTEN // 2**30} GiB, and this one would become"
        f" {list(written)}, {_size(written, call.bias_dtype)}"
    )
    return Reason(who, "bias", rule, f"pass hidden keys as mask= instead of a bias, or {USE_AUTO}")


def note(call: Call, always: bool = False) -> str:
    """Return a note on a bias's memory; `always` if each backward computes the bias's gradient."""
    workspace = _size((call.batch, call.heads, call.q_len, call.kv_len), call.dtype)
    when = "cuDNN's backward" if always else "if the bias has a gradient, cuDNN"
    return f"{written_text(call)}; {when} needs {workspace} more"


def written_text(call: Call) -> str:
    shape = written_shape(call)
    size = _size(shape, call.bias_dtype)
    return f"the bias and the mask are written out as one array {list(shape)} of {size}"


def written_shape(call: Call) -> tuple[int, int, int, int]:
    """Return the shape of the bias that is passed to a library."""
    assert call.bias is not None
    pair = np.arange(2)
    seen = jax.eval_shape(lambda mask: mask.allowed(pair, pair), call.mask).shape
    batch = call.batch if max(call.bias[0], seen[0]) > 1 else 1
    heads = call.heads if max(call.bias[1], seen[1]) > 1 else 1
    return batch, heads, call.q_len, call.kv_len


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * (4 if dtype == "float32" else 2)


def _size(shape: tuple[int, ...], dtype: str) -> str:
    size = _bytes(shape, dtype)
    number, unit = (size / 2**30, "GiB") if size >= 2**30 else (size / 2**20, "MiB")
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
