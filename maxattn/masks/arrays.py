"""The arrays that masks hold: their dtypes, their dims, and how both are checked."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.errors import InputError
from maxattn.masks.base import Lengths, Mask, text

INT32 = np.iinfo(np.int32)


def four_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the four dims [B, N, T, S] of a table of two, three or four."""
    if len(shape) == 3:
        return shape[0], 1, *shape[1:]
    return (1,) * (4 - len(shape)) + shape


def as_array(mask: Mask, name: str) -> Any:
    """Keep a field as an array: lists become numpy, usual arrays and shapes stay as they are."""
    value = getattr(mask, name)
    usual = as_usual(value if hasattr(value, "dtype") else np.asarray(value))
    if usual is not value:
        object.__setattr__(mask, name, usual)
    return usual


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """Reshape an array or a form; what has the shape already stays the same object."""
    known = int(np.prod([n for n in shape if n != -1]))
    target = tuple(n if n != -1 else int(np.prod(array.shape)) // max(known, 1) for n in shape)
    if tuple(array.shape) == target:
        return array
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(target, array.dtype)
    return array.reshape(target)


def check_dims(
    name: str, array: Any, letters: str, lengths: Lengths, broadcast: str = "B", given: Any = None
) -> None:
    """Check every dim of a leaf against the lengths; `given` is the leaf before it was reshaped."""
    sizes = {"B": lengths.batch, "N": lengths.heads, "T": lengths.q_len, "S": lengths.kv_len}
    for letter, size in zip(letters, array.shape, strict=True):
        if sizes[letter] in (None, size) or (size == 1 and letter in broadcast):
            continue
        wanted = ", ".join(f"{x}={'any' if sizes[x] is None else sizes[x]}" for x in letters)
        ones = f", where {', '.join(broadcast)} may be 1" if broadcast else ""
        remedy = f"give {letter} of {sizes[letter]}, it has {size}"
        value = text(array if given is None else given)
        raise InputError(name, value, f"its dims are [{wanted}]{ones}", remedy)


def name_dims(array: Any, letters: str, broadcast: str) -> str:
    """Name the dims of a leaf; one of size 1 that may be broadcast is "1"."""
    pairs = zip(letters, array.shape, strict=True)
    return "".join("1" if n == 1 and x in broadcast else x for x, n in pairs)


def is_wide(array: Any) -> bool:
    """Tell whether numpy integers do not fit int32, or jax ones are of a dtype that may not.

    Masks are computed in int32, and the values of a jax array may be traced.
    """
    if isinstance(array, jax.Array):
        return array.dtype.itemsize > 4 or array.dtype == np.uint32
    if not isinstance(array, np.ndarray) or not array.size or not is_int(array):
        return False
    return int(array.max()) > INT32.max or int(array.min()) < INT32.min


def narrow(array: Any) -> Any:
    """Bring integers into int32: larger ones become its largest, and negative ones -1."""
    if isinstance(array, np.ndarray):
        return np.maximum(np.minimum(array, INT32.max).astype(np.int64), -1).astype(np.int32)
    with jax.enable_x64(True):
        signed = jnp.minimum(array, jnp.asarray(INT32.max, array.dtype)).astype(jnp.int64)
        return jnp.maximum(signed, -1).astype(jnp.int32)


def as_usual(array: Any) -> Any:
    """Bring integers of 4 bits into int32, and those of another byte order into this machine's."""
    if isinstance(array, jax.ShapeDtypeStruct) or not is_int(array):
        return array
    if jnp.iinfo(array.dtype).bits < 8:
        return array.astype(np.int32)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def ranked(q_ids: Any, kv_ids: Any) -> tuple[Any, Any]:
    """Number the ids of both arrays anew, so that int32 holds them: equal ones stay equal.

    Negative ids become -1.
    """
    with jax.enable_x64(True):
        pair = [jnp.asarray(ids) for ids in (q_ids, kv_ids)]
        # Of one unsigned dtype: int64 and uint64 have no common integer.
        known = [jnp.maximum(ids, 0).astype(jnp.uint64) for ids in pair]
        every = jnp.sort(jnp.concatenate([ids.ravel() for ids in known]))
        found = [jnp.searchsorted(every, ids).astype(jnp.int32) for ids in known]
        return tuple(jnp.where(old < 0, -1, new) for old, new in zip(pair, found, strict=True))  # pyright: ignore[reportReturnType]


def check_ids(name: str, ids: np.ndarray) -> None:
    """Refuse ids that would become others in int32."""
    if ids.size and ids.max() > INT32.max:
        rule = f"segment ids are int32, at most {INT32.max}"
        how = "e.g. by numpy.unique(ids, return_inverse=True) over both arrays"
        raise InputError(name, f"up to {ids.max()}", rule, f"number them from 0, {how}")


def is_bool(array: Any) -> bool:
    """Tell whether the dtype is bool."""
    return array.dtype == np.bool_


def is_int(array: Any) -> bool:
    """Tell whether the dtype is of integers (numpy counts spans of time among them)."""
    return jnp.issubdtype(array.dtype, jnp.integer) and array.dtype.kind != "m"
