"""`Call`: the shapes, the mask and the settings of an attention call, without arrays or devices."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from math import inf
from operator import index
from typing import Any, Literal

import jax

from maxattn.config.numbers import is_number
from maxattn.errors import InputError, brief
from maxattn.errors import Reason as Reason
from maxattn.masks import Full, Mask
from maxattn.masks.operands import (
    bias_shape,
    bind_mask,
    check_bias_dtype,
    check_dtype,
    check_dtypes,
    check_heads,
    check_operands,
)

Role = Literal["self", "cross"]
SHORT_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Call:
    """The structure of one attention call: hashable, comparable, printable.

    `Call.of(q, k)` makes a call from arrays.

    Args:
        batch, q_len, kv_len, heads, kv_heads, head_dim: the sizes B, T, S, N, K, H.
        dtype: "float32" (default), "bfloat16" or "float16".
        mask: a mask of `maxattn.masks`; the call stores the bound mask with shapes in place of
            arrays; default `Full()`.
        bias: shape of the additive bias, each of its four sizes 1 or full; default None.
        scale: factor of the scores; default 0, which means head_dim ** -0.5.
        role: "self" (default) or "cross"; decides which setting of the config names the kernel,
            `attention` or `cross_attention`.
        return_lse: whether the log-sum-exp is returned; default False.
        sharded: whether the call is one device's part of a sequence, so that token positions are
            known only when the call runs; default False.
        sequence: for one device's part, T and S of the whole padded sequence; default None.
        bias_dtype: dtype of the bias; default "", which means `dtype`.
        value_head_dim: V, the head dim of values and output; default 0, which means H.

    Raises:
        InputError: a size, dtype, mask, bias, scale or role is invalid.

    >>> q = jax.ShapeDtypeStruct((2, 4096, 8, 64), jnp.bfloat16)
    >>> call = ma.Call.of(q, q, mask=ma.masks.Causal())
    >>> call.shape_text, str(call.mask)
    ('B=2 T=S=4096 N=8 H=64 bf16', 'Causal(offset=0)')
    """

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"
    mask: Mask = field(default_factory=Full)
    bias: tuple[int, int, int, int] | None = None
    scale: float = 0.0
    role: Role = "self"
    return_lse: bool = False
    sharded: bool = False
    sequence: tuple[int, int] | None = None
    bias_dtype: str = ""
    value_head_dim: int = 0

    def __post_init__(self) -> None:
        for name, value in checked_fields(self).items():
            object.__setattr__(self, name, value)

    def derived(self, **changes: Any) -> Call:
        """Return a call with some fields changed, unchecked: its bias may have other lengths."""
        call = object.__new__(Call)
        call.__dict__.update(self.__dict__)
        call.__dict__.update(changes)
        return call

    @staticmethod
    def of(
        q: Any,
        k: Any,
        mask: Any = None,
        bias: Any = None,
        scale: float | None = None,
        role: Role = "self",
        return_lse: bool = False,
        value_head_dim: int | None = None,
    ) -> Call:
        """Make a call from arrays, or from any values with `shape` and `dtype`.

        Args:
            q: queries [B, T, N, H].
            k: keys [B, S, K, H].
            mask, bias, scale, role, return_lse: as for `attention`.
            value_head_dim: V, the last axis of the values; default H.

        Raises:
            InputError: a rank, dtype, head count, mask, bias or scale is invalid.
        """
        call = bound_call(q, k, None, mask, bias, scale, role, return_lse)[0]
        if value_head_dim is None:
            return call
        return call.derived(value_head_dim=_value_size(value_head_dim, call.head_dim))

    @property
    def shape_text(self) -> str:
        """The sizes and dtype as text, such as `B=1 T=S=4096 N=16 H=64 bf16`."""
        same = self.q_len == self.kv_len
        lengths = f"T=S={self.q_len}" if same else f"T={self.q_len} S={self.kv_len}"
        heads = f"N={self.heads}" + (f" K={self.kv_heads}" if self.kv_heads != self.heads else "")
        dtype = SHORT_DTYPE.get(self.dtype, self.dtype)
        dims = f"H={self.head_dim}" + (f" V={self.value_dim}" if self.value_head_dim else "")
        return f"B={self.batch} {lengths} {heads} {dims} {dtype}"

    @property
    def value_dim(self) -> int:
        """V, the head dim of values and output."""
        return self.value_head_dim or self.head_dim

    def of_dtype(self, q: Any, k: Any, v: Any) -> Call:
        """Return the call with the dtype of q, k and v; refuse a dtype that kernels lack."""
        check_dtypes(q, k, v)
        dtype = str(q.dtype)
        return self if dtype == self.dtype else self.derived(dtype=dtype)


_FIELDS = tuple(f.name for f in fields(Call))


def bound_call(
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    bias: Any = None,
    scale: float | None = None,
    role: Role = "self",
    return_lse: bool = False,
    *,
    mask_padding: bool = True,
) -> tuple[Call, Mask]:
    """Check operands and bind the mask; return the call, and the bound mask with its arrays.

    v is None if there are no values yet; `mask_padding=False` drops key padding from the mask.
    """
    check_operands(q, k, v)
    _check_choice("return_lse", return_lse, (False, True))
    (b, t, n, h), (s, kv_heads) = q.shape, k.shape[1:3]
    bias_sizes, number = bias_shape(bias, (b, n, t, s)), static_scale(scale, h)
    bound = bind_mask(mask, q, k, mask_padding=mask_padding)
    what = str(q.dtype), bound.form(), bias_sizes, number
    last = None, "" if bias is None else str(bias.dtype)
    own_values = 0 if v is None or v.shape[3] == h else v.shape[3]
    every = (b, t, s, n, kv_heads, h, *what, role, return_lse, False, *last, own_values)
    call = object.__new__(Call)  # its fields are checked already
    call.__dict__.update(zip(_FIELDS, every, strict=True))
    return call, bound


# Beyond these limits a scale is infinite or 0 in float32, in which scores are computed.
MOST_SCALE, LEAST_SCALE = 3.4028234e38, 1.2e-38


def static_scale(scale: float | None, head_dim: int) -> float:
    """Return the scale, default head_dim ** -0.5; refuse tracers and values outside float32."""
    if scale is None:
        return float(head_dim) ** -0.5
    if type(scale) is int and abs(scale) > MOST_SCALE:  # float() of a huge int raises
        scale = inf
    if not is_number(scale):
        found = repr(scale) if isinstance(scale, str | bool) else type(scale).__name__
        remedy = "multiply q by a learned or traced scale instead"
        raise InputError("scale", found, "scale must be a static number", remedy)
    value = float(scale)
    if not LEAST_SCALE <= abs(value) <= MOST_SCALE:
        rule = "scale must be a finite float32 number other than 0"
        raise InputError("scale", value, rule, "leave it out for head_dim ** -0.5")
    return value


# ---- calls made from fields ----------------------------------------------------------------------


def checked_fields(call: Call) -> dict[str, Any]:
    """Check the fields of `Call(...)`, and return them as `Call.of` would set them."""
    found: dict[str, Any] = {name: _size(name, getattr(call, name)) for name in _FIELDS[:6]}
    b, t, s, n, kv_heads, h = found.values()
    check_heads(n, kv_heads)
    check_dtype("dtype", call.dtype if isinstance(call.dtype, str) else repr(call.dtype))
    _check_choice("role", call.role, ("self", "cross"))
    for name in ("return_lse", "sharded"):
        _check_choice(name, getattr(call, name), (False, True))
    scale = None if is_number(call.scale) and call.scale == 0 else call.scale
    found |= {"scale": static_scale(scale, h), "sequence": call.sequence}
    if call.sequence is not None:
        if not isinstance(call.sequence, tuple) or len(call.sequence) != 2:
            rule = "sequence must be (T, S), or None"
            raise InputError("sequence", brief(call.sequence), rule, "leave it out")
        found["sequence"] = tuple(_size("sequence", length) for length in call.sequence)
    full = None if call.sharded else (b, t, s, n)
    check_bias_dtype(bias_dtype := call.bias_dtype or call.dtype)
    return found | {
        "mask": _form(call.mask, full),
        "bias": _bias_of(call.bias, full),
        "bias_dtype": "" if call.bias is None else bias_dtype,
        "value_head_dim": _value_size(call.value_head_dim, h),
    }


def _size(name: str, value: Any) -> int:
    try:
        number = 0 if isinstance(value, bool) else index(value)
    except (TypeError, jax.errors.JAXTypeError):
        number = 0
    if number < 1:
        rule, remedy = "it must be a whole number of at least 1", "give it, or use Call.of(q, k)"
        raise InputError(name, brief(value), rule, remedy)
    return number


def _value_size(value: Any, head_dim: int) -> int:
    """Return the head dim of values, or 0 if it equals the head dim of keys."""
    size = 0 if type(value) is int and value == 0 else _size("value_head_dim", value)
    return 0 if size == head_dim else size


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if not any(type(value) is type(x) and value == x for x in known):
        rule = f"it must be one of {', '.join(map(repr, known))}"
        raise InputError(name, brief(value), rule, f"write {known[0]!r}, or leave it out")


def _form(mask: Any, full: tuple[int, ...] | None) -> Mask:
    """Return a mask's form, bound to the sizes `full`; if None, the mask must be bound already."""
    if not isinstance(mask, Mask):
        rule, remedy = "it must be a mask of maxattn.masks", "write a table as masks.Dense(table)"
        raise InputError("mask", type(mask).__name__, rule, remedy)
    if full is not None:
        b, t, s, n = full
        return mask.bind(t, s, b, n).form()
    if not mask.is_bound:
        rule = "if sharded=True, the mask must be bound to the lengths of the whole sequence"
        raise InputError("mask", mask, rule, "call mask.bind(q_len, kv_len) with these lengths")
    return mask.form()


def _bias_of(bias: Any, full: tuple[int, ...] | None) -> tuple[int, int, int, int] | None:
    if bias is None:
        return None
    if not isinstance(bias, tuple | list) or len(bias) != 4:
        rule, remedy = "bias must be a shape of four sizes", "give bias.shape, [B, N, T, S]"
        raise InputError("bias", brief(bias), rule, remedy)
    b, n, t, s = (_size("bias", x) for x in bias)
    sizes = (b, n, t, s) if full is None else (full[0], full[3], *full[1:3])
    if any(x not in (1, y) for x, y in zip((b, n, t, s), sizes, strict=True)):
        rule = f"each size must be 1 or full; the full sizes [B, N, T, S] are {sizes}"
        raise InputError("bias", (b, n, t, s), rule, "make each size 1 or full")
    return b, n, t, s
