"""Which biases cuDNN takes, through jax and through TransformerEngine, and what they cost.

Source: NVIDIA cudnn-frontend 1.23, `set_bias` and `set_dbias`; TransformerEngine 2.20 for the
shapes whose gradient cuDNN sums.
"""

from __future__ import annotations

from math import prod

import jax
import numpy as np

from maxattn.call import Call, Reason
from maxattn.jax_private.versions import numbers
from maxattn.kernels.base import USE_AUTO
from maxattn.kernels.fused import cudnn_limits
from maxattn.target import Target

LEAST_CUDNN = "9.18"
HEAD_LIMIT = 128
MOST_WRITTEN = 8 * 2**30


def refuse(who: str, call: Call, target: Target) -> Reason | None:
    """Return why cuDNN cannot add the bias of a call that it could compute without."""
    reason = _refuse_dtype(who, call) or refuse_head_dim(who, call)
    return reason or _refuse_version(who, call, target) or refuse_size(who, call)


def refuse_any(who: str, call: Call) -> Reason | None:
    """Return why a kernel that takes no bias cannot compute a call."""
    if call.bias is None:
        return None
    return Reason(who, "bias", "it takes no additive bias", USE_AUTO)


def note(call: Call, always: bool = False) -> str:
    """Say what memory a bias takes beside the bias itself.

    Args:
        call: of one device.
        always: whether the gradient of the bias is computed whoever asks.
    """
    workspace = call.batch, call.heads, call.q_len, call.kv_len
    when = "the backward of cuDNN" if always else "where it has a gradient, cuDNN"
    return f"{written_text(call)}; {when} needs {_size(workspace, call.dtype)} beside it"


def written_text(call: Call) -> str:
    """Say what is made of the bias of a device's call."""
    shape = written_shape(call)
    size = _size(shape, call.bias_dtype)
    return f"the bias is written out as {list(shape)}, {size}, with what the mask hides"


def written_shape(call: Call) -> tuple[int, int, int, int]:
    """Return the shape that a device's library is given the bias in."""
    assert call.bias is not None
    pair = np.arange(2)
    seen = jax.eval_shape(lambda mask: mask.allowed(pair, pair), call.mask).shape
    apart = [x > 1 or y > 1 for x, y in zip(call.bias[:2], seen[:2], strict=True)]
    batch, heads = (n if own else 1 for n, own in zip((call.batch, call.heads), apart, strict=True))
    return batch, heads, call.q_len, call.kv_len


def refuse_size(who: str, call: Call) -> Reason | None:
    """Refuse to make a large array of a bias that broadcasts, or of a mask of batch rows."""
    assert call.bias is not None
    written = written_shape(call)
    full = (call.batch, call.heads, call.q_len, call.kv_len)
    own = tuple(1 if x == 1 else n for x, n in zip(call.bias, full, strict=True))
    if written == own or _bytes(written, call.bias_dtype) <= MOST_WRITTEN:
        return None
    rule = (
        f"it would write the bias out as {list(written)}, {_size(written, call.bias_dtype)}, and"
        f" makes at most {MOST_WRITTEN // 2**30} GiB of a smaller one"
    )
    return Reason(who, "bias", rule, f"say what hides keys as a mask, or {USE_AUTO}")


def refuse_head_dim(who: str, call: Call) -> Reason | None:
    """Refuse the head dims at which no kernel here was tried with a bias."""
    if call.head_dim <= HEAD_LIMIT:
        return None
    rule = f"it takes a bias at head dims up to {HEAD_LIMIT}, and this is {call.head_dim}"
    return Reason(who, f"bias at head dim {call.head_dim}", rule, USE_AUTO)


def _refuse_dtype(who: str, call: Call) -> Reason | None:
    if call.bias_dtype == call.dtype:
        return None
    rule = f"it adds a bias in the dtype of q, {call.dtype}, and this one is {call.bias_dtype}"
    remedy = f"round it yourself, bias.astype(q.dtype), or {USE_AUTO}"
    return Reason(who, f"bias {call.bias_dtype}", rule, remedy)


def _refuse_version(who: str, call: Call, target: Target) -> Reason | None:
    there = cudnn_limits.version(target)
    if there is None or not numbers(there) or numbers(there) >= numbers(LEAST_CUDNN):
        return None
    rule = f"for a bias it needs cuDNN {LEAST_CUDNN} or newer, and this is {there}"
    return Reason(who, "bias", rule, f"install a newer cuDNN, or {USE_AUTO}")


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * (4 if dtype == "float32" else 2)


def _size(shape: tuple[int, ...], dtype: str) -> str:
    size = _bytes(shape, dtype)
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"
