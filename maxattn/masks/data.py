"""Masks that depend on arrays: lengths or flags of keys, segment ids, a whole table of pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.errors import InputError
from maxattn.masks.base import Lengths, Mask, Span, Spots, text
from maxattn.masks.tree import leaf, mask_type

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

INT32 = np.iinfo(np.int32)


class DataMask(Mask):
    """Count as everything or as nothing where only bounds are asked, since the arrays may be
    traced.
    """

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """Give everything for an upper bound and nothing for a lower one."""
        return ((None, None),) if data else ()


@mask_type
class KeyPadding(DataMask):
    """Allow each batch row its real keys: `key < lengths[b]`, or `flags[b, key]`.

    Args:
        keys: lengths `int[B]`, or flags `bool[B, S]` with True for a real key.

    Raises:
        InputError: the array is neither.

    >>> from maxattn import masks
    >>> print(masks.KeyPadding([2]).show(3, 4))
    KeyPadding(int64[1])
    3 queries down, 4 keys across
    █ █ · ·
    █ █ · ·
    █ █ · ·
    >>> print(masks.KeyPadding([[True, False, True]]).show(2, 3))
    KeyPadding(bool[1,3])
    2 queries down, 3 keys across
    █ · █
    █ · █
    """

    keys: Int[Array, " B"] | Bool[Array, "B S"] | np.ndarray = leaf()

    def __post_init__(self) -> None:
        """Tell lengths from flags by dtype and dims."""
        keys = _array(self, "keys")
        if (_is_int(keys), _is_bool(keys), keys.ndim) not in ((True, False, 1), (False, True, 2)):
            rule = "lengths are whole numbers [B], flags are bool [B, S] with True for a real key"
            remedy = (
                "for 0/1 numbers use keys != 0, for one row add a batch dim, for [B, N, T, S] use"
                " Dense"
            )
            raise InputError("KeyPadding.keys", text(keys), rule, remedy)
        if _is_wide(keys):  # no sequence is as long: a limit past int32 is none
            object.__setattr__(self, "keys", _narrow(keys))

    def at(self, spots: Spots) -> Any:
        """Compare positions with lengths, or look flags up."""
        keys = spots.xp.asarray(self.keys)
        if _is_bool(keys):
            return spots.xp.take(keys, spots.kv_idx, axis=-1, mode="clip").reshape(
                -1, 1, 1, spots.kv_idx.shape[0]
            )
        return spots.kv_pos[None, None, None, :] < keys.reshape(-1, 1, 1, 1)

    def bound_to(self, lengths: Lengths) -> Mask:
        """Check the batch, and the number of flags."""
        flags = _is_bool(self.keys)
        keys = _reshaped(self.keys, (-1, self.keys.shape[-1]) if flags else (-1,))
        _fits("KeyPadding.keys", keys, "BS" if flags else "B", lengths)
        return self if keys is self.keys else replace(self, keys=keys)

    def axes(self) -> tuple[str, ...]:
        """Name the batch, and the keys of flags."""
        return (_named(self.keys, "BS" if _is_bool(self.keys) else "B", "B"),)

    @property
    def is_key_padding(self) -> bool:
        """Whether it marks the padding of each batch row."""
        return True

    def key_limit(self) -> Any:
        """Give the lengths; flags mark keys in no order."""
        return None if _is_bool(self.keys) else self.keys


@mask_type
class Segments(DataMask):
    """Allow pairs of the same segment: `q_ids[b, query] == kv_ids[b, key]`, and neither negative.

    Args:
        q_ids: segment of each query, `int[B, T]`; negative ids are padding and attend to nothing.
        kv_ids: segment of each key, `int[B, S]`; negative ids are padding and are never attended
            to.

    Raises:
        InputError: an array is not a table of whole numbers.

    >>> from maxattn import masks
    >>> print(masks.Segments([[0, 0, 1, -1]], [[0, 1, 1, -1, 0]]).show(4, 5))
    Segments(int64[1,4], int64[1,5])
    4 queries down, 5 keys across
    █ · · · █
    █ · · · █
    · █ █ · ·
    · · · · ·
    """

    q_ids: Int[Array, "B T"] | np.ndarray = leaf()
    kv_ids: Int[Array, "B S"] | np.ndarray = leaf()

    def __post_init__(self) -> None:
        """Check that both are tables of whole numbers."""
        for name, dims in (("q_ids", "[B, T]"), ("kv_ids", "[B, S]")):
            ids = _array(self, name)
            if not _is_int(ids) or ids.ndim != 2:
                rule = f"segment ids are whole numbers {dims}"
                raise InputError(
                    f"Segments.{name}",
                    text(ids),
                    rule,
                    "cast to int32, for one row add a batch dim",
                )
            if _is_wide(ids):
                _check_ids(f"Segments.{name}", ids)
                object.__setattr__(self, name, _narrow(ids))

    def at(self, spots: Spots) -> Any:
        """Compare the ids looked up."""
        q = spots.xp.take(spots.xp.asarray(self.q_ids), spots.q_idx, axis=-1, mode="clip")
        kv = spots.xp.take(spots.xp.asarray(self.kv_ids), spots.kv_idx, axis=-1, mode="clip")
        q, kv = q.reshape(-1, 1, q.shape[-1], 1), kv.reshape(-1, 1, 1, kv.shape[-1])
        return (q == kv) & (q >= 0)

    def bound_to(self, lengths: Lengths) -> Mask:
        """Check batch and lengths."""
        q_ids, kv_ids = (_reshaped(ids, (-1, ids.shape[-1])) for ids in (self.q_ids, self.kv_ids))
        _fits("Segments.q_ids", q_ids, "BT", lengths)
        _fits("Segments.kv_ids", kv_ids, "BS", lengths)
        return (
            self
            if (q_ids is self.q_ids and kv_ids is self.kv_ids)
            else replace(self, q_ids=q_ids, kv_ids=kv_ids)
        )

    def axes(self) -> tuple[str, ...]:
        """Name batch, queries and keys."""
        return _named(self.q_ids, "BT", "B"), _named(self.kv_ids, "BS", "B")

    def segment_ids(self) -> tuple[Any, Any]:
        """Give both arrays."""
        return self.q_ids, self.kv_ids


@mask_type
class Dense(DataMask):
    """Allow the pairs that a table marks True.

    Args:
        table: `bool[T, S]`, `bool[B, T, S]` or `bool[B, N, T, S]`; any dim may be 1 and is then
            broadcast.

    Raises:
        InputError: the table is not bool, or has another number of dims.

    >>> from maxattn import masks
    >>> print(masks.Dense([[True, False], [False, True]]).show(2, 2))
    Dense(bool[1,1,2,2])
    2 queries down, 2 keys across
    █ ·
    · █
    """

    table: Bool[Array, "*dims"] | np.ndarray = leaf()

    def __post_init__(self) -> None:
        """Check dtype and dims."""
        table = _array(self, "table")
        if not _is_bool(table):
            rule = "a mask is bool, True where a query may attend"
            remedy = "for 0/1 numbers use table != 0, pass an additive mask as bias="
            raise InputError("Dense.table", text(table), rule, remedy)
        if not 2 <= table.ndim <= 4:
            remedy = "for flags of keys use KeyPadding, else add or drop dims"
            raise InputError(
                "Dense.table", text(table), "dims are [T, S], [B, T, S] or [B, N, T, S]", remedy
            )

    def at(self, spots: Spots) -> Any:
        """Look the pairs up, one gather for both dims."""
        table = spots.xp.asarray(self.table).reshape(_four(self.table.shape))
        q, kv = (
            spots.xp.clip(i, 0, n - 1) if n > 1 else spots.xp.zeros((1,), dtype=i.dtype)
            for i, n in zip((spots.q_idx, spots.kv_idx), table.shape[2:], strict=True)
        )
        return table[:, :, q[:, None], kv[None, :]]

    def bound_to(self, lengths: Lengths) -> Mask:
        """Bring to four dims and check all of them."""
        table = _reshaped(self.table, _four(self.table.shape))
        _fits("Dense.table", table, "BNTS", lengths, broadcast="BNTS", given=self.table)
        return self if table is self.table else replace(self, table=table)

    def axes(self) -> tuple[str, ...]:
        """Name the dims there are."""
        letters = {2: "TS", 3: "BTS", 4: "BNTS"}[len(self.table.shape)]
        return (_named(self.table, letters, letters),)

    @property
    def is_of_keys(self) -> bool:
        """Whether the table says the same for every query and head."""
        return all(axes[-3:-1].strip("1") == "" for axes in self.axes())


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the four dims [B, N, T, S] of a table of two, three or four."""
    return (
        (*((1,) * (4 - len(shape)) if len(shape) != 3 else (shape[0], 1)), *shape[-2:])
        if len(shape) < 4
        else shape
    )


def _array(mask: Mask, name: str) -> Any:
    """Keep a field as an array: lists become numpy, arrays and shapes stay as they are."""
    value = getattr(mask, name)
    if not hasattr(value, "dtype"):
        value = np.asarray(value)
        object.__setattr__(mask, name, value)
    return value


def _reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """Reshape an array or a form; what has the shape already stays the same object."""
    known = int(np.prod([n for n in shape if n != -1]))
    target = tuple(n if n != -1 else int(np.prod(array.shape)) // max(known, 1) for n in shape)
    if tuple(array.shape) == target:
        return array
    return (
        jax.ShapeDtypeStruct(target, array.dtype)
        if isinstance(array, jax.ShapeDtypeStruct)
        else array.reshape(target)
    )


def _fits(
    name: str, array: Any, letters: str, lengths: Lengths, broadcast: str = "B", given: Any = None
) -> None:
    """Check every dim of a leaf against the lengths it is bound to; `given` is the leaf before it
    was reshaped.
    """
    sizes = {"B": lengths.batch, "N": lengths.heads, "T": lengths.q_len, "S": lengths.kv_len}
    for letter, size in zip(letters, array.shape, strict=True):
        want = sizes[letter]
        if want is not None and size != want and not (size == 1 and letter in broadcast):
            wanted = ", ".join(f"{x}={'any' if sizes[x] is None else sizes[x]}" for x in letters)
            rule = f"its dims are [{wanted}]" + (
                f", where {', '.join(broadcast)} may be 1" if broadcast else ""
            )
            raise InputError(
                name,
                text(array if given is None else given),
                rule,
                f"give {letter} of {want}, it has {size}",
            )


def _named(array: Any, letters: str, broadcast: str) -> str:
    return "".join(
        "1" if n == 1 and x in broadcast else x for x, n in zip(letters, array.shape, strict=True)
    )


def _is_wide(array: Any) -> bool:
    """Tell whether an array holds integers that int32, in which masks are computed, does not
    hold.
    """
    if not isinstance(array, np.ndarray) or not array.size or not _is_int(array):
        return False
    return int(array.max()) > INT32.max or int(array.min()) < INT32.min


def _narrow(array: np.ndarray) -> np.ndarray:
    """Bring integers into int32: what is above becomes the largest, and all below 0 mean the
    same.
    """
    return np.maximum(np.minimum(array, INT32.max).astype(np.int64), -1).astype(np.int32)


def _check_ids(name: str, ids: np.ndarray) -> None:
    """Refuse ids that would become others in int32."""
    if ids.size and ids.max() > INT32.max:
        remedy = (
            "number them from 0, e.g. by numpy.unique(ids, return_inverse=True) over both arrays"
        )
        raise InputError(
            name, f"up to {ids.max()}", f"segment ids are int32, at most {INT32.max}", remedy
        )


def _is_bool(array: Any) -> bool:
    return array.dtype == np.bool_


def _is_int(array: Any) -> bool:
    return jnp.issubdtype(array.dtype, jnp.integer)
