"""Values that describe one attention call: its shapes, and why a kernel refuses it. No arrays, no
devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Literal

from maxattn.errors import InputError
from maxattn.masks import Dense, Full, Mask

Role = Literal["self", "cross"]
DTYPES = ("float32", "bfloat16", "float16")
SHORT_DTYPE = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


@dataclass(frozen=True)
class Reason:
    """Say why something was refused: who, which feature, and the rule with its value.

    Args:
        who: the kernel or context strategy that refuses.
        feature: what it was asked for, in a word or two.
        rule: one sentence with the value and the limit.
        remedy: what would lift it, or empty.
    """

    who: str
    feature: str
    rule: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.who}: {self.rule}" + (f" ({self.remedy})" if self.remedy else "")


@dataclass(frozen=True)
class Call:
    """Describe one attention call by its structure: hashable, comparable, printable.

    Args:
        batch, q_len, kv_len, heads, kv_heads, head_dim: B, T, S, N, K, H.
        dtype: "float32", "bfloat16" or "float16".
        mask: the bound mask with shapes in place of arrays.
        bias: shape of the additive bias, each of its four sizes 1 or full, or None.
        scale: multiplies the scores; default head_dim ** -0.5.
        role: "self" or "cross": which setting of the config governs it.
        return_lse: whether the log-sum-exp is asked for.
        sharded: whether this is one device's share, whose positions are known only where it runs.
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

    def __post_init__(self) -> None:
        if self.scale == 0.0:
            object.__setattr__(self, "scale", float(self.head_dim) ** -0.5)

    @staticmethod
    def of(
        q: Any,
        k: Any,
        mask: Any = None,
        bias: Any = None,
        scale: float | None = None,
        role: Role = "self",
        return_lse: bool = False,
    ) -> Call:
        """Read a call off arrays, or anything with `shape` and `dtype`.

        Args:
            q: [B, T, N, H].
            k: [B, S, K, H]; v must have the same shape.
            mask: a mask, bound or not, or a boolean array as for `attention`; None attends to
                everything.
            bias: additive, each axis 1 or full size of [B, N, T, S].

        Raises:
            InputError: on a wrong rank, dtype, head count or mask.
        """
        check_operands(q, k)
        (b, t, n, h), (s, kh) = q.shape, (k.shape[1], k.shape[2])
        bound = as_mask(mask, q, k).bind(t, s, b, n).form()
        return Call(
            b,
            t,
            s,
            n,
            kh,
            h,
            str(q.dtype),
            bound,
            _bias_shape(bias, (b, n, t, s)),
            _scale(scale, h),
            role,
            return_lse,
        )

    @property
    def shape_text(self) -> str:
        """Spell the shape as `B=1 T=S=4096 N=16 H=64 bf16`."""
        lengths = (
            f"T=S={self.q_len}" if self.q_len == self.kv_len else f"T={self.q_len} S={self.kv_len}"
        )
        heads = f"N={self.heads}" + (f" K={self.kv_heads}" if self.kv_heads != self.heads else "")
        return (
            f"B={self.batch} {lengths} {heads} H={self.head_dim}"
            f" {SHORT_DTYPE.get(self.dtype, self.dtype)}"
        )


def as_mask(mask: Any, q: Any, k: Any) -> Mask:
    """Return a mask as it is, None as `Full`, and a boolean array as `Dense`.

    Raises:
        InputError: neither a mask nor an array, or an array that looks like flags of keys.
    """
    if mask is None:
        return Full()
    if isinstance(mask, Mask):
        return mask
    if not _is_array(mask):
        raise InputError(
            "mask",
            repr(mask) if isinstance(mask, str | bool) else type(mask).__name__,
            "a mask is a mask of maxattn.masks or a boolean array",
            "write for example masks.Causal() or masks.KeyPadding(lengths)",
        )
    if tuple(mask.shape) == (q.shape[0], k.shape[1]) and q.shape[0] != q.shape[1]:
        raise InputError(
            "mask",
            f"shape {tuple(mask.shape)}",
            "an array of two axes is [T, S], and this looks like [B, S]",
            "say masks.KeyPadding(mask) for keys that are padding",
        )
    return Dense(mask)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check_operands(q: Any, k: Any, v: Any = None) -> None:
    """Refuse queries, keys and values whose ranks, sizes or dtypes do not fit together.

    Raises:
        InputError: naming the operand, what it is, and the rule.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x is not None or name != "v":
            _check_one(name, x)
    (b, _, n, h), (kb, _, kn, kh) = q.shape, k.shape
    if kb != b:
        raise InputError(
            "k",
            f"batch {kb}",
            f"q has batch {b}, and both must be equal",
            "give q, k and v one batch size",
        )
    if kh != h:
        raise InputError(
            "k",
            f"head dim {kh}",
            f"q has head dim {h}, and both must be equal",
            "project both to one size",
        )
    if n % kn:
        raise InputError(
            "kv_heads",
            kn,
            f"the {n} query heads must be a multiple of the key heads",
            f"use a number of key heads that divides {n}",
        )
    if v is not None and tuple(v.shape) != tuple(k.shape):
        raise InputError(
            "v",
            tuple(v.shape),
            f"v must have the shape of k, {tuple(k.shape)}",
            "pass k and v of one shape",
        )
    if len({str(x.dtype) for x in (q, k, v) if x is not None}) > 1:
        found = ", ".join(str(x.dtype) for x in (q, k, v) if x is not None)
        raise InputError(
            "dtype", found, "q, k and v must have one dtype", "cast them to one before the call"
        )


def _check_one(name: str, x: Any) -> None:
    axes = "[B, T, N, H]" if name == "q" else "[B, S, K, H]"
    if not _is_array(x):
        raise InputError(
            name,
            "None" if x is None else type(x).__name__,
            f"{name} must be an array {axes}",
            f"pass {name} as one",
        )
    shape, dtype = tuple(x.shape), str(x.dtype)
    if len(shape) != 4:
        raise InputError(
            name,
            f"shape {shape}",
            f"{name} must be {axes}, four axes",
            "split the heads first, e.g. with maxattn.modules.split_heads(x, heads)",
        )
    if not all(isinstance(size, int) for size in shape):
        raise InputError(
            name,
            f"shape {shape}",
            "every size must be a number, since kernels are chosen by them",
            "export or trace with fixed shapes",
        )
    if 0 in shape:
        raise InputError(
            name,
            f"shape {shape}",
            "every size must be at least 1",
            "skip the call when there is nothing to attend",
        )
    if dtype not in DTYPES:
        raise InputError(
            name,
            dtype,
            f"dtype must be one of {', '.join(DTYPES)}",
            f"cast it, e.g. {name}.astype(jnp.float32)",
        )


def _bias_shape(bias: Any, full: tuple[int, int, int, int]) -> tuple[int, int, int, int] | None:
    if bias is None:
        return None
    if not _is_array(bias):
        raise InputError(
            "bias",
            type(bias).__name__,
            f"it is an array that broadcasts to [B, N, T, S] = {full}",
            "pass an array; a mask goes to mask=",
        )
    shape = tuple(bias.shape)
    shape = (1,) * (4 - len(shape)) + shape
    if len(shape) != 4 or any(x not in (1, f) for x, f in zip(shape, full, strict=True)):
        raise InputError(
            "bias",
            f"shape {tuple(bias.shape)}",
            f"it must broadcast to [B, N, T, S] = {full}",
            "give every axis its full size or 1",
        )
    if str(bias.dtype) not in DTYPES:
        floating = "a bias is additive and floating: float32, bfloat16 or float16"
        is_mask = str(bias.dtype) == "bool"
        remedy = (
            "a boolean mask goes to mask=, as masks.Dense(mask)"
            if is_mask
            else "cast it, e.g. to float32"
        )
        raise InputError("bias", str(bias.dtype), floating, remedy)
    return shape  # type: ignore[return-value]


def is_number(value: Any) -> bool:
    """Tell whether a value is one number that is known now: text, booleans, tracers and complex
    numbers are not.
    """
    if (
        isinstance(value, str | bytes | bool | complex)
        or str(getattr(value, "dtype", "")) == "bool"
    ):
        return False
    try:
        float(value)
    except (TypeError, ValueError):  # a tracer's error is a TypeError
        return False
    return True


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return float(head_dim) ** -0.5
    if not is_number(scale):
        raise InputError(
            "scale",
            repr(scale) if isinstance(scale, str | bool) else type(scale).__name__,
            "scale is a static number",
            "multiply q by a learned or traced scale instead",
        )
    value = float(scale)
    if value == 0.0 or not isfinite(value):
        rule = "scale must be a finite number other than 0"
        raise InputError("scale", scale, rule, "leave it out for head_dim ** -0.5")
    return value
