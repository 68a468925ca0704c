"""Masks that depend on arrays: lengths or flags of keys, segment ids, a whole table of pairs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.errors import InputError
from maxattn.jax_private.mesh import is_tracer
from maxattn.masks.base import Lengths, Mask, Spots
from maxattn.masks.packed import SegmentLengths
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.spans import Span
from maxattn.masks.tile_kinds import TileBounds, Tiles, of_ids, unknown
from maxattn.masks.tree import leaf, mask_type, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Array, Bool, Int

INT32 = np.iinfo(np.int32)


class DataMask(Mask):
    """A mask with arrays, which may be traced, so its only bounds are all keys and no key."""

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        return ((None, None),) if data else ()

    def row_blocks(self) -> tuple[RowBlocks, ...]:
        return ()

    def on_tiles(self, tiles: Tiles) -> TileBounds:
        return unknown()


@mask_type
class KeyPadding(DataMask):
    """Allow each batch row its real keys: `key < keys[b]` by lengths, `keys[b, key]` by flags.

    Args:
        keys: lengths `int[B]`, or flags `bool[B, S]` with True for a real key.

    Raises:
        InputError: `keys` is neither lengths nor flags; or, when the mask is bound, a length is
            below 0 or above S. Under `jit` values cannot be checked: a length below 0 counts as 0,
            one above S as S.

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
        keys = as_array(self, "keys")
        if (is_int(keys), is_bool(keys), keys.ndim) not in ((True, False, 1), (False, True, 2)):
            rule = "keys must be integer lengths [B], or bool flags [B, S] with True for a real key"
            remedy = "for 0/1 numbers use keys != 0, for one batch row add a batch dim,"
            remedy += " for [B, N, T, S] use Dense"
            if jnp.issubdtype(keys.dtype, jnp.floating):  # a 0 keeps its key: != 0 would hide it
                added = "bias=keys[:, None, None]" if keys.ndim == 2 else "bias=keys"
                remedy = f"pass an additive mask as {added}, and 0/1 numbers as keys != 0"
                remedy = remedy if keys.ndim > 1 else "cast lengths to int32"
            raise InputError("KeyPadding.keys", text(keys), rule, remedy)
        if is_wide(keys):  # lengths are clipped to int32, which no sequence exceeds
            object.__setattr__(self, "keys", narrow(keys))

    def at(self, spots: Spots) -> Any:
        keys = spots.xp.asarray(self.keys)
        if is_bool(keys):
            here = spots.xp.take(keys, spots.kv_idx, axis=-1, mode="clip")
            return here.reshape(-1, 1, 1, spots.kv_idx.shape[0])
        return spots.kv_pos[None, None, None, :] < keys.reshape(-1, 1, 1, 1)

    def bound_to(self, lengths: Lengths) -> Mask:
        flags = is_bool(self.keys)
        keys = reshaped(self.keys, (-1, self.keys.shape[-1]) if flags else (-1,))
        check_dims("KeyPadding.keys", keys, "BS" if flags else "B", lengths)
        if not flags:
            _check_lengths(keys, lengths.kv_len)
        return self if keys is self.keys else replace(self, keys=keys)

    def axes(self) -> tuple[str, ...]:
        return (name_dims(self.keys, "BS" if is_bool(self.keys) else "B", "B"),)

    def on_tiles(self, tiles: Tiles) -> TileBounds:
        if is_bool(self.keys):
            flags = tiles.cut(self.keys, 1)[:, None]
            return TileBounds(flags.any(axis=-1), flags.all(axis=-1))
        lengths = jnp.asarray(self.keys).reshape(-1, 1, 1)
        start, end = (x[None, None] for x in tiles.key_ends())
        return TileBounds(start < lengths, end <= lengths)

    @property
    def bounds_tiles(self) -> bool:
        return True

    @property
    def is_key_padding(self) -> bool:
        return True

    def key_limit(self) -> Any:
        return None if is_bool(self.keys) else self.keys


def _check_lengths(keys: Any, most: int) -> None:
    """Refuse lengths that no sequence of `most` keys has, if their values can be read."""
    if is_tracer(keys) or not isinstance(keys, np.ndarray | jax.Array):
        return
    if isinstance(keys, jax.Array) and not keys.is_fully_addressable:
        return
    numbers = np.asarray(keys)
    if (wrong := np.flatnonzero((numbers < 0) | (numbers > most))).size:
        row = int(wrong[0])
        rule = f"a length must be from 0 to the {most} keys of the call"
        remedy = f"give jnp.clip(lengths, 0, {most}), or flags [B, S] of real keys"
        raise InputError(f"KeyPadding.keys[{row}]", int(numbers[row]), rule, remedy)


@mask_type
class Segments(DataMask):
    """Allow pairs of the same segment: `q_ids[b, query] == kv_ids[b, key] >= 0`.

    Args:
        q_ids: segment of each query, `int[B, T]`; negative ids are padding, which attends to
            nothing.
        kv_ids: segment of each key, `int[B, S]`; negative ids are padding, to which nothing
            attends.

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

    @staticmethod
    def of_lengths(lengths: Sequence[int], kv_lengths: Sequence[int] | None = None) -> Mask:
        """Allow pairs of the same segment, if segments follow one another in every batch row.

        The lengths are static: kernels skip the pairs between segments, and a call with other
        lengths is compiled anew.

        Args:
            lengths: numbers of queries of each segment; their sum is the call's query length T.
            kv_lengths: numbers of keys of each segment, whose sum is S; default `lengths`.

        Raises:
            InputError: a length is no whole number of at least 0, or there are too many lengths;
                when the mask is bound, the sum of lengths is not T or S.

        >>> from maxattn import masks
        >>> print(masks.Segments.of_lengths((2, 1, 3)).show(6, 6))
        Segments.of_lengths((2, 1, 3))
        6 queries down, 6 keys across
        █ █ · · · ·
        █ █ · · · ·
        · · █ · · ·
        · · · █ █ █
        · · · █ █ █
        · · · █ █ █
        """
        return SegmentLengths(lengths, kv_lengths)  # pyright: ignore[reportArgumentType]

    def __post_init__(self) -> None:
        for name, dims in (("q_ids", "[B, T]"), ("kv_ids", "[B, S]")):
            ids = as_array(self, name)
            if not is_int(ids) or ids.ndim != 2:
                rule = f"segment ids must be whole numbers {dims}"
                remedy = "cast to int32, for one batch row add a batch dim"
                raise InputError(f"Segments.{name}", text(ids), rule, remedy)
            if is_wide(ids) and isinstance(ids, np.ndarray):
                if ids.max() > INT32.max:  # int32 would wrap it to another id
                    rule = f"segment ids are int32, at most {INT32.max}"
                    how = "number them from 0, e.g. by numpy.unique(ids, return_inverse=True) over"
                    found = f"up to {ids.max()}"
                    raise InputError(f"Segments.{name}", found, rule, f"{how} both arrays")
                object.__setattr__(self, name, narrow(ids))
        if is_wide(self.q_ids) or is_wide(self.kv_ids):
            for name, ids in zip(("q_ids", "kv_ids"), ranked(self.q_ids, self.kv_ids), strict=True):
                object.__setattr__(self, name, ids)

    def at(self, spots: Spots) -> Any:
        q = spots.xp.take(spots.xp.asarray(self.q_ids), spots.q_idx, axis=-1, mode="clip")
        kv = spots.xp.take(spots.xp.asarray(self.kv_ids), spots.kv_idx, axis=-1, mode="clip")
        q, kv = q.reshape(-1, 1, q.shape[-1], 1), kv.reshape(-1, 1, 1, kv.shape[-1])
        return (q == kv) & (q >= 0)

    def bound_to(self, lengths: Lengths) -> Mask:
        q_ids, kv_ids = (reshaped(ids, (-1, ids.shape[-1])) for ids in (self.q_ids, self.kv_ids))
        check_dims("Segments.q_ids", q_ids, "BT", lengths)
        check_dims("Segments.kv_ids", kv_ids, "BS", lengths)
        if q_ids is self.q_ids and kv_ids is self.kv_ids:
            return self
        return replace(self, q_ids=q_ids, kv_ids=kv_ids)

    def axes(self) -> tuple[str, ...]:
        return name_dims(self.q_ids, "BT", "B"), name_dims(self.kv_ids, "BS", "B")

    def on_tiles(self, tiles: Tiles) -> TileBounds:
        return of_ids(tiles.cut(self.q_ids, 0), tiles.cut(self.kv_ids, 1))

    @property
    def bounds_tiles(self) -> bool:
        return True

    @property
    def leaves_parts_empty(self) -> bool:
        return True

    def segment_ids(self) -> tuple[Any, Any]:
        return self.q_ids, self.kv_ids


@mask_type
class Dense(DataMask):
    """Allow the pairs that a table marks: `table[b, head, query, key]`.

    Args:
        table: `bool[T, S]`, `bool[B, T, S]` or `bool[B, N, T, S]`; a dim of 1 is broadcast.

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
        table = as_array(self, "table")
        if not is_bool(table):
            rule = "the table must be bool, True where a query may attend"
            remedy = "for 0/1 numbers use table != 0, pass an additive mask as bias="
            if jnp.issubdtype(table.dtype, jnp.floating):  # a 0 keeps its pair
                remedy = "pass an additive mask as bias=, and 0/1 numbers as table != 0"
            raise InputError("Dense.table", text(table), rule, remedy)
        if not 2 <= table.ndim <= 4:
            rule = "the dims must be [T, S], [B, T, S] or [B, N, T, S]"
            remedy = "for flags of keys use KeyPadding, else add or drop dims"
            raise InputError("Dense.table", text(table), rule, remedy)

    def at(self, spots: Spots) -> Any:
        table = spots.xp.asarray(self.table).reshape(four_dims(self.table.shape))
        q, kv = (
            spots.xp.clip(i, 0, n - 1) if n > 1 else spots.xp.zeros((1,), dtype=i.dtype)
            for i, n in zip((spots.q_idx, spots.kv_idx), table.shape[2:], strict=True)
        )
        return table[:, :, q[:, None], kv[None, :]]

    def bound_to(self, lengths: Lengths) -> Mask:
        table = reshaped(self.table, four_dims(self.table.shape))
        check_dims("Dense.table", table, "BNTS", lengths, broadcast="BNTS", given=self.table)
        return self if table is self.table else replace(self, table=table)

    def axes(self) -> tuple[str, ...]:
        letters = {2: "TS", 3: "BTS", 4: "BNTS"}[len(self.table.shape)]
        return (name_dims(self.table, letters, letters),)

    @property
    def is_of_keys(self) -> bool:
        return all(axes[-3:-1].strip("1") == "" for axes in self.axes())


# ---- arrays: checks of dtypes and dims -----------------------------------------------------------


def four_dims(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 3:
        return shape[0], 1, *shape[1:]
    return (1,) * (4 - len(shape)) + shape


def as_array(mask: Mask, name: str) -> Any:
    """Store a field as an array: numpy for a list, int32 for int4, with native byte order."""
    value = getattr(mask, name)
    where = f"{type(mask).__name__}.{name}"
    array = value if hasattr(value, "dtype") else of_list(value, where)
    if not isinstance(array, jax.ShapeDtypeStruct) and is_int(array):
        if jnp.iinfo(array.dtype).bits < 8:
            array = array.astype(np.int32)
        elif not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
    if array is not value:
        object.__setattr__(mask, name, array)
    return array


def of_list(value: Any, where: str) -> Any:
    """Convert a list to an array of numpy, or of jax if it has traced numbers."""
    try:
        try:
            return np.asarray(value)
        except jax.errors.TracerArrayConversionError:
            return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        rule, remedy = "its rows must be equally long", "pad the rows to one length"
        raise InputError(
            where, f"a {type(value).__name__} of unequal rows", rule, remedy
        ) from error


def reshaped(array: Any, shape: tuple[int, ...]) -> Any:
    """Reshape an array or a `ShapeDtypeStruct`; return it unchanged if it has the shape."""
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
    """Check every dim of an array; an error shows `given`, the array before it was reshaped."""
    sizes = {"B": lengths.batch, "N": lengths.heads, "T": lengths.q_len, "S": lengths.kv_len}
    for letter, size in zip(letters, array.shape, strict=True):
        if sizes[letter] in (None, size) or (size == 1 and letter in broadcast):
            continue
        wanted = ", ".join(f"{x}={'any' if sizes[x] is None else sizes[x]}" for x in letters)
        ones = f", where {', '.join(broadcast)} may be 1" if broadcast else ""
        remedy = f"give {letter} the size {sizes[letter]}; it is {size}"
        value = text(array if given is None else given)
        raise InputError(name, value, f"its dims must be [{wanted}]{ones}", remedy)


def name_dims(array: Any, letters: str, broadcast: str) -> str:
    """Return the names of an array's dims, with "1" for a `broadcast` dim of size 1."""
    pairs = zip(letters, array.shape, strict=True)
    return "".join("1" if n == 1 and x in broadcast else x for x, n in pairs)


def is_wide(array: Any) -> bool:
    """Check whether integers may exceed int32: by value in numpy, by dtype in jax."""
    if isinstance(array, jax.Array):
        return array.dtype.itemsize > 4 or array.dtype == np.uint32
    if not isinstance(array, np.ndarray) or not array.size or not is_int(array):
        return False
    return int(array.max()) > INT32.max or int(array.min()) < INT32.min


def narrow(array: Any) -> Any:
    """Clip integers into int32; negative numbers become -1."""
    if isinstance(array, np.ndarray):
        return np.maximum(np.minimum(array, INT32.max).astype(np.int64), -1).astype(np.int32)
    with jax.enable_x64(True):
        signed = jnp.minimum(array, jnp.asarray(INT32.max, array.dtype)).astype(jnp.int64)
        return jnp.maximum(signed, -1).astype(jnp.int32)


def ranked(q_ids: Any, kv_ids: Any) -> tuple[Any, Any]:
    """Renumber the ids of both arrays in int32: equal ids stay equal, negative ids become -1."""
    with jax.enable_x64(True):
        pair = [jnp.asarray(ids) for ids in (q_ids, kv_ids)]
        # Sort both as unsigned: int64 and uint64 have no common integer dtype.
        known = [jnp.maximum(ids, 0).astype(jnp.uint64) for ids in pair]
        every = jnp.sort(jnp.concatenate([ids.ravel() for ids in known]))
        found = [jnp.searchsorted(every, ids).astype(jnp.int32) for ids in known]
        return tuple(jnp.where(old < 0, -1, new) for old, new in zip(pair, found, strict=True))  # pyright: ignore[reportReturnType]


def is_bool(array: Any) -> bool:
    return array.dtype == np.bool_


def is_int(array: Any) -> bool:
    # numpy counts timedelta64 among the integers
    return jnp.issubdtype(array.dtype, jnp.integer) and array.dtype.kind != "m"
