"""Checks of a call's operands, and the conversion of a caller's `mask=` to a bound mask."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from maxattn.errors import InputError
from maxattn.jax_private.mesh import is_tracer
from maxattn.masks.algebra import And, Full
from maxattn.masks.base import Mask
from maxattn.masks.data import Dense

log = logging.getLogger("maxattn")
DTYPES = ("float32", "bfloat16", "float16")
AXES = "q is [B, T, N, H] and k is [B, S, K, H], tokens before heads"
SWAP = "if heads come before tokens, as in torch, pass jnp.swapaxes(x, 1, 2)"


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def check_operands(q: Any, k: Any, v: Any = None) -> None:
    """Refuse queries, keys and values whose ranks, sizes or dtypes do not fit together."""
    _check_one("q", q, "[B, T, N, H]")
    _check_one("k", k, "[B, S, K, H]")
    if v is not None:
        _check_one("v", v, "[B, S, K, V]")
    (b, _, n, h), (kb, _, kn, kh) = q.shape, k.shape
    if kb != b:
        rule = f"q has batch {b}, and both batch sizes must be equal; {AXES}"
        raise InputError("k", f"batch {kb}", rule, "give q, k and v one batch size")
    if kh != h:
        rule = f"q has head dim {h}, and both head dims must be equal; {AXES}"
        raise InputError("k", f"head dim {kh}", rule, "project both to one size")
    if n % kn:
        rule = f"{AXES}, so q has {n} heads, which must be a multiple of the {kn} key heads"
        remedy = f"use a number of key heads that divides {n}; {SWAP}"
        raise InputError("k", f"shape {tuple(k.shape)}", rule, remedy)
    if v is not None and tuple(v.shape[:3]) != tuple(k.shape[:3]):
        rule = f"v is [B, S, K, V], and its B, S and K must be those of k, {tuple(k.shape[:3])}"
        remedy = "pass k and v of one shape; the last axis of v may differ"
        raise InputError("v", tuple(v.shape), rule, remedy)
    check_dtypes(q, k, v)


def check_heads(heads: int, kv_heads: int) -> None:
    """Refuse a number of query heads that is no multiple of the key heads."""
    if heads % kv_heads:
        rule = f"the {heads} query heads must be a multiple of the key heads"
        remedy = f"use a number of key heads that divides {heads}"
        raise InputError("kv_heads", kv_heads, rule, remedy)


def check_dtypes(q: Any, k: Any, v: Any = None) -> None:
    """Refuse operands of different dtypes, or of a dtype that no kernel computes in."""
    dtypes = {n: str(x.dtype) for n, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    for name, dtype in dtypes.items():
        check_dtype(name, dtype)
    if len(set(dtypes.values())) > 1:
        rule, remedy = "q, k and v must have one dtype", "cast them to one before the call"
        raise InputError("dtype", ", ".join(dtypes.values()), rule, remedy)


def check_dtype(name: str, dtype: str) -> None:
    """Refuse a dtype that no kernel computes in."""
    check_not_torch(name, dtype)
    if dtype not in DTYPES:
        rule, remedy = f"dtype must be one of {', '.join(DTYPES)}", f"{name}.astype(jnp.float32)"
        raise InputError(name, dtype, rule, f"cast it, e.g. {remedy}")


def _check_one(name: str, x: Any, axes: str) -> None:
    if not _is_array(x):
        found = "None" if x is None else type(x).__name__
        raise InputError(name, found, f"{name} must be an array {axes}", f"pass an array as {name}")
    shape = tuple(x.shape)
    if len(shape) != 4:
        rule = f"{name} must be {axes}, four axes"
        remedy = f"reshape it to {axes}, such as by joining frames and tokens"
        if len(shape) == 3:
            remedy = (
                "add a batch axis to [T, N, H] by x[None], or split the heads of [B, T, N*H] by"
                " maxattn.modules.split_heads(x, heads)"
            )
    elif not all(isinstance(size, int) for size in shape):
        rule = "every size must be a fixed number, since sizes decide which kernel runs"
        remedy = "export or trace with fixed shapes"
    elif 0 in shape:
        rule = "every size must be at least 1"
        remedy = "skip the call when an operand is empty"
    else:
        return check_values(name, x)
    raise InputError(name, f"shape {shape}", rule, remedy)


def check_values(name: str, given: Any) -> None:
    """Refuse deleted arrays of jax, and masked arrays of numpy, among an argument's arrays."""
    for x in jax.tree.leaves(given):
        if isinstance(x, np.ma.MaskedArray):
            rule = "a masked array of numpy is not read, since its mask would be lost"
            remedy = "pass x.filled(0), and leave keys out with mask=masks.KeyPadding(flags)"
        elif isinstance(x, jax.Array) and not is_tracer(x) and x.is_deleted():
            rule = "the array was deleted, as arrays are that a program took by donation"
            remedy = "use what that program returned, or do not donate the array"
        else:
            continue
        raise InputError(name, f"{x.dtype}{list(x.shape)}", rule, remedy)


def bias_shape(bias: Any, full: tuple[int, int, int, int]) -> tuple[int, int, int, int] | None:
    """Return the four sizes of a bias, each 1 or full; refuse one that does not broadcast."""
    if bias is None:
        return None
    if not _is_array(bias):
        rule = f"bias must be an array that broadcasts to [B, N, T, S] = {full}"
        remedy = "pass an array; a mask goes to mask="
        raise InputError("bias", type(bias).__name__, rule, remedy)
    shape = (1,) * (4 - len(bias.shape)) + tuple(bias.shape)
    by_row = _by_batch_row(bias.shape, full)
    if len(shape) != 4 or any(x not in (1, f) for x, f in zip(shape, full, strict=True)):
        found, remedy = f"shape {tuple(bias.shape)}", "give every axis its full size or 1"
        remedy = f"write bias[{by_row[1]}] for {by_row[0]}" if by_row else remedy
        raise InputError("bias", found, f"it must broadcast to [B, N, T, S] = {full}", remedy)
    if by_row:
        usual = {2: "[T, S]", 3: "[N, T, S]"}[len(bias.shape)]
        rule = _two_readings("bias", bias.shape, usual, by_row[0])
        remedy = f"write bias[None] for {usual}; bias[{by_row[1]}] for {by_row[0]}"
        raise InputError("bias", f"shape {tuple(bias.shape)}", rule, remedy)
    check_not_torch("bias", str(bias.dtype))
    check_bias_dtype(str(bias.dtype))
    check_values("bias", bias)
    return shape  # type: ignore[return-value]


def _by_batch_row(shape: tuple[int, ...], full: tuple[int, ...]) -> tuple[str, str] | None:
    """Return the axes of an array that may be by batch row, and the index that makes them four."""
    b, _, t, s = full
    if b > 1 and len(shape) in (2, 3) and shape[0] == b and shape[-1] in (1, s):
        if len(shape) == 2:
            return "[B, S]", ":, None, None"
        if shape[1] in (1, t):
            return "[B, T, S]", ":, None"
    return None


def _two_readings(name: str, shape: tuple[int, ...], usual: str, other: str) -> str:
    """Return the rule for an array of two or three axes whose first axis fits twice."""
    axes, equal = ("two", "B = T") if len(shape) == 2 else ("three", "B = N")
    rule = f"a {name} of {axes} axes is {usual}, but with {equal} = {shape[0]}"
    return f"{rule} it may also be {other}"


def check_bias_dtype(dtype: str) -> None:
    """Refuse a bias whose dtype is not floating."""
    if dtype in DTYPES:
        return
    rule = "a bias must be floating: float32, bfloat16 or float16"
    remedy = "a boolean mask goes to mask=, as masks.Dense(mask)"
    if dtype != "bool":
        remedy = "cast it, e.g. to float32"
        remedy += "; a mask of 0 and 1 goes to mask=, as mask != 0" if "int" in dtype else ""
    raise InputError("bias", dtype, rule, remedy)


def bind_mask(mask: Any, q: Any, k: Any, *, mask_padding: bool = True) -> Mask:
    """Convert a caller's `mask=` argument to a mask, and bind it to the call's lengths."""
    (b, t, n, _), s = q.shape, k.shape[1]
    bound = as_mask(mask, q, k).bind(t, s, b, n)
    return bound if mask_padding else without_padding(bound)


def without_padding(mask: Mask) -> Mask:
    """Return the mask without its `KeyPadding` terms, for `mask_padding_tokens: false`."""
    kept = tuple(term for term in mask.terms() if not term.is_key_padding)
    return And(kept).canonical() if kept else Full()


def as_mask(mask: Any, q: Any, k: Any) -> Mask:
    """Return a mask, None as `Full` and a boolean array as `Dense`; refuse flags of keys."""
    if mask is None:
        return Full()
    check_values("mask", mask)
    if isinstance(mask, Mask):
        return mask
    if not (hasattr(mask, "shape") and hasattr(mask, "dtype")):
        found = repr(mask) if isinstance(mask, str | bool) else type(mask).__name__
        rule = "it must be a mask of maxattn.masks or a boolean array"
        remedy = "write for example masks.Causal() or masks.KeyPadding(lengths)"
        if isinstance(mask, list | tuple):
            of_masks = any(isinstance(each, Mask) for each in mask)
            remedy = "write masks.LocalWindow(left, right) for a window of (left, right) keys"
            remedy += ", jnp.asarray(mask) for flags, masks.KeyPadding(mask) for lengths"
            remedy = "combine masks by a & b, or by a | b" if of_masks else remedy
        raise InputError("mask", found, rule, remedy)
    check_not_torch("mask", str(mask.dtype))
    if len(mask.shape) == 1:
        rule = "a mask array has two to four axes: [T, S], [B, T, S] or [B, N, T, S]"
        remedy = "write masks.KeyPadding(lengths) for the number of real keys of each batch row"
        remedy += ", mask[None] for flags of keys that are alike in all batch rows"
        raise InputError("mask", f"{mask.dtype} of shape {tuple(mask.shape)}", rule, remedy)
    (b, _, n, _), shape = q.shape, tuple(mask.shape)
    by_row = _by_batch_row(shape, (b, n, q.shape[1], k.shape[1]))
    if len(shape) == 3 and by_row and b == n:
        rule = _two_readings("mask array", shape, by_row[0], "[N, T, S]")
        remedy = f"write mask[{by_row[1]}] for {by_row[0]}; mask[None] for [N, T, S]"
        raise InputError("mask", f"shape {shape}", rule, remedy)
    if shape != (b, k.shape[1]) or b == 1:  # [1, S] means the same either way
        return Dense(mask)
    rule = "a mask array of two axes must be [T, S], but this shape looks like [B, S]"
    flags, pairs = ("mask", "mask") if mask.dtype == bool else ("mask != 0", "(mask != 0)")
    remedy, added = f"write masks.KeyPadding({flags}) for keys that are padding", ""
    if b == q.shape[1]:
        rule = _two_readings("mask array", shape, "[T, S]", "[B, S]")
        remedy = f"write {pairs}[None] for [T, S]; masks.KeyPadding({flags}) for [B, S]"
        remedy, added = f"{remedy}, True = a real key", " for [B, S], bias=mask for [T, S]"
    if jnp.issubdtype(mask.dtype, jnp.floating):  # 0 keeps a key, and != 0 would hide it
        remedy = (
            f"pass an additive mask as bias=mask[:, None, None]{added}; for 0/1 numbers {remedy}"
        )
    raise InputError("mask", f"shape {shape}", rule, remedy)


def check_not_torch(name: str, dtype: str) -> None:
    """Refuse a torch tensor, recognised by its dtype; the remedy converts it to an array."""
    if dtype.startswith("torch."):
        whole = f"{name}.float()" if dtype == "torch.bfloat16" else name  # numpy has no bfloat16
        rule = "it must be an array of jax or numpy, and this is a torch tensor"
        raise InputError(name, dtype, rule, f"pass jnp.asarray({whole}.numpy())")


# ---- check_finite --------------------------------------------------------------------------------


class NotFinite(NamedTuple):
    """The number of NaN and infinite entries in one operand, and the index of the first entry."""

    count: Int[Array, ""]
    first: Int[Array, " axes"]
    is_hidden: Bool[Array, ""]
    """Whether the mask hides the key of the first such entry from every query."""


def check_finite(operands: dict[str, Any], mask: Mask | None = None) -> None:
    """Refuse NaN and infinity in an operand for `check_finite: true`; a bias may be -inf.

    A kernel multiplies a hidden key by 0, and 0 * NaN is NaN, so a NaN would reach every query.
    Traced operands are checked when the program runs. Then the error is logged, since jax raises it
    inside the text of an error of its own.

    Args:
        operands: q [B, T, N, H], k, v [B, S, K, H] and bias [B|1, N|1, T|1, S|1] by name, or None;
            or numbers of a rotary table, under a name that begins with "rotary_emb".
        mask: the bound mask of the call; None without keys.
    """
    there = {name: x for name, x in operands.items() if x is not None}
    found = {name: _count(name, x, there.get("q"), mask) for name, x in there.items()}
    if any(is_tracer(x) for x in jax.tree.leaves(found)):
        jax.debug.callback(_refuse_and_log, found)
    else:
        _refuse(found)


def _count(name: str, x: Array, q: Any, mask: Mask | None) -> NotFinite:
    bad = jnp.isnan(x) | (x == jnp.inf) if name == "bias" else ~jnp.isfinite(x)
    count, index = bad.sum(dtype=jnp.int32), []
    while bad.ndim:  # axis by axis: a flat index may exceed int32
        index.append(jnp.argmax(bad.any(axis=tuple(range(1, bad.ndim)))))
        bad = bad[index[-1]]
    first, is_hidden = jnp.stack(index), jnp.array(False)
    if name in ("k", "v") and mask is not None:
        seen = mask.allowed(jnp.arange(q.shape[1]), first[1:2])  # [B|1, N|1, T|1, 1]
        is_hidden = ~jnp.any(seen[jnp.minimum(first[0], seen.shape[0] - 1)])
    return NotFinite(count, first, is_hidden)


def _refuse_and_log(found: dict[str, NotFinite]) -> None:
    try:
        _refuse(found)
    except InputError as error:
        log.error("%s", error)
        raise


def _refuse(found: dict[str, NotFinite]) -> None:
    for name, (count, first, is_hidden) in found.items():
        if int(count):
            where = ", ".join(str(int(i)) for i in np.asarray(first))
            hidden = ", a key that the mask hides" if is_hidden else ""
            value = f"NaN or infinity {int(count)} times, first at [{where}]{hidden}"
            rule = "check_finite: true needs finite numbers, also in hidden keys, as 0 * NaN is NaN"
            remedy = f"replace them, e.g. jnp.nan_to_num({name})"
            if name.startswith("rotary_emb"):
                rule = "check_finite: true needs finite angles; those of a frame below 0 are NaN"
                remedy = "make it with maxattn.rope, from frame numbers of at least 0"
            raise InputError(name, value, rule, remedy)
