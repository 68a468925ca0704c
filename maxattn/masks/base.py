"""`Mask`, the base of every mask: a frozen value and a pytree.

A mask is a function of positions. The fields are numbers, which are static, and small arrays, which
are pytree leaves. The connectives are in `algebra.py`, the kinds in `positions.py`, `packed.py`,
`video.py` and `data.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import MISSING, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.errors import InputError
from maxattn.masks import blocks
from maxattn.masks.for_kernels import ForKernels
from maxattn.masks.spans import BIG, Span
from maxattn.masks.tile_kinds import TileBounds, Tiles
from maxattn.masks.tree import check_numbers, field_names, text

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Int

    Ints = Int[Array, "..."] | Int[np.ndarray, "..."]
    Bools = Bool[Array, "..."] | Bool[np.ndarray, "..."]


class Lengths(NamedTuple):
    """The sizes of the call that a mask is bound to; None is a size that was not given."""

    q_len: int
    kv_len: int
    batch: int | None = None
    heads: int | None = None


class Spots(NamedTuple):
    """Pairs to evaluate: indexes into a mask's arrays, positions, and numpy or jax.numpy."""

    q_idx: Any
    kv_idx: Any
    q_pos: Any
    kv_pos: Any
    xp: Any


class Extent(NamedTuple):
    """The number of masks in a mask's tree, this mask included, and the tree's depth."""

    masks: int
    levels: int


class Mask(ForKernels):
    """Which keys a query may attend to: True means attend.

    Masks combine with `&`, `|` and `~` into a canonical form, so that equal masks built in
    different ways are equal. Two array leaves are equal if they are the same array; `form()`
    compares the structure alone.

    >>> from maxattn import masks
    >>> masks.KeyLimit(3) & (masks.KeyLimit(3) | masks.Causal())
    KeyLimit(3)
    >>> masks.Causal().bind(q_len=2, kv_len=6)
    Causal(offset=4)
    >>> masks.BlockSlidingWindow(4, 2).block_map(4, 4, 16, 16)
    array([[1, 0, 0, 0],
           [1, 1, 0, 0],
           [0, 1, 1, 0],
           [0, 0, 1, 1]], dtype=int8)
    """

    __array_ufunc__ = None  # so that numpy calls `Mask.__rand__` for `array & mask`

    # -- what each kind of mask defines ------------------------------------------------------------

    def spans(self, q_pos: Any, xp: Any, data: bool) -> tuple[Span, ...]:
        """Return intervals that bound the keys of each query; see `intervals` for `data`."""
        raise NotImplementedError(type(self).__name__)

    def at(self, spots: Spots) -> Any:
        """Evaluate the mask at spots: bool, broadcastable to [B, N, q_idx, kv_idx]."""
        none, every = (make((1, 1, 1, 1), dtype=bool) for make in (spots.xp.zeros, spots.xp.ones))
        keys, out = spots.kv_pos[None, None, None, :], none  # against [1, 1, t, 1]
        for lo, hi in self.spans(spots.q_pos, spots.xp, True):
            inside = every if lo is None else every & (keys >= lo[None, None, :, None])
            out = out | (inside if hi is None else inside & (keys < hi[None, None, :, None]))
        return out

    def __post_init__(self) -> None:
        check_numbers(self)

    def bound_to(self, lengths: Lengths) -> Mask:
        """Replace an offset of None, and check numbers and arrays against the call's sizes."""
        return self

    def simplified(self) -> Mask:
        """Return a mask of a simpler kind that allows the same pairs, or this mask."""
        return self

    def axes(self) -> tuple[str, ...]:
        """Name the dims of this mask's own array leaves, in their order."""
        return ()

    def on_tiles(self, tiles: Tiles) -> TileBounds:
        """Return bounds that show which tiles are empty or full, computed on the device."""
        return tiles.of_positions(self)

    def over_leaves(self, change: Callable[[Mask], Mask]) -> Mask:
        """Apply a change to every mask in the tree that does not join or negate other masks."""
        return change(self)

    def own_period(self) -> int | None:
        """Return the mask's own block length in tokens, without its parts; None without blocks."""
        return None

    # -- algebra: properties are cached, so that hundreds of masks are joined quickly --------------

    is_normal = False
    """Whether the mask is known to be canonical; `canonical` sets it on the masks that it joins."""

    def __and__(self, other: Mask) -> Mask:
        from maxattn.masks.algebra import And

        return And((self, _checked(other))).canonical()

    def __or__(self, other: Mask) -> Mask:
        from maxattn.masks.algebra import Or

        return Or((self, _checked(other))).canonical()

    __rand__, __ror__ = __and__, __or__  # the other operand is no mask: `_checked` refuses it

    def __invert__(self) -> Mask:
        """Return the mask of the pairs that this mask forbids."""
        from maxattn.masks.algebra import Not

        return Not(self).canonical()

    def __bool__(self) -> bool:
        """Raise `InputError`: a mask has no truth value, and `a and b` would silently be `b`."""
        remedy = "combine masks with &, | and ~; test for a missing mask with `is None`"
        raise InputError("mask", self, "a mask has no truth value", remedy)

    def canonical(self) -> Mask:
        """Return the negation normal form: flat, sorted, without repeated, Full or Empty parts."""
        from maxattn.masks.algebra import canonical

        return canonical(self)

    @cached_property
    def extent(self) -> Extent:
        """The number of masks in this mask's tree, and the tree's depth."""
        parts = [part.extent for part in self.parts()]
        levels = max((part.levels for part in parts), default=0)
        return Extent(1 + sum(part.masks for part in parts), 1 + levels)

    @cached_property
    def identity(self) -> tuple[Any, ...]:
        """A key that two masks share if they have equal structure and the same array objects."""
        parts = tuple(part.identity for part in self.parts())
        arrays = () if parts else (id(getattr(self, name)) for name in field_names(type(self))[0])
        return type(self), self._numbers(), parts, tuple(arrays)

    @cached_property
    def order(self) -> tuple[Any, ...]:
        """The key that sorts masks by kind and numbers; equal keys keep the caller's order."""
        numbers = tuple((n is not None, n or 0) for n in self._numbers())
        return type(self).__name__, numbers, tuple(part.order for part in self.parts())

    def _numbers(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in field_names(type(self))[1])

    # -- what callers use --------------------------------------------------------------------------

    def bind(
        self, q_len: int, kv_len: int, batch: int | None = None, heads: int | None = None
    ) -> Mask:
        """Fit the mask to a call: resolve offsets, check leaves, return the canonical form.

        An offset of None becomes `kv_len - q_len`: the last query sits at the last key. Binding
        twice changes nothing.

        Args:
            q_len, kv_len: numbers of queries T and keys S, without padding.
            batch, heads: B and N, for the check of arrays' dims; default None skips the check.

        Raises:
            InputError: there are more queries than keys and no offset, or an array or the frames of
                a video mask do not fit the lengths.
        """
        lengths = Lengths(q_len, kv_len, batch, heads)
        return self.over_leaves(lambda mask: mask.bound_to(lengths)).canonical()

    @property
    def is_bound(self) -> bool:
        """Whether the mask and all its parts have an offset that is not None."""
        return getattr(self, "offset", 0) is not None and all(
            part.is_bound for part in self.parts()
        )

    def allowed(
        self, q_idx: Ints, kv_idx: Ints, q_offset: int | Ints = 0, kv_offset: int | Ints = 0
    ) -> Bools:
        """Return whether each query may attend to each key.

        Args:
            q_idx, kv_idx: indexes `[t]` and `[s]` into the mask's arrays, which may be those of one
                shard; an index beyond an array's end reads the last entry.
            q_offset, kv_offset: positions of query 0 and key 0 in the sequence; may be traced.

        Returns:
            bool `[B or 1, N or 1, t or 1, s or 1]`; numpy unless an argument or an array of the
            mask is a jax array.

        Raises:
            InputError: an offset is None, since the mask is not bound.
        """
        given = (q_idx, kv_idx, q_offset, kv_offset, *jax.tree.leaves(self))
        xp = jnp if any(isinstance(x, jax.Array) for x in given) else np
        q, kv = xp.asarray(q_idx, dtype=xp.int32), xp.asarray(kv_idx, dtype=xp.int32)
        return self.at(Spots(q, kv, q + q_offset, kv + kv_offset, xp))

    def intervals(
        self, q_pos: Ints, xp: Any = np, data: bool = True
    ) -> tuple[tuple[Any, Any], ...]:
        """Return half-open intervals of key positions that bound the keys of each query.

        Args:
            q_pos: positions of the queries, in any shape; traced positions need `xp=jnp`.
            xp: `numpy` or `jax.numpy`.
            data: whether a mask with arrays counts as allowing every key (True, the default: an
                upper bound) or no key (False: a lower bound). Masks without arrays are exact.

        Returns:
            Pairs `(lo, hi)` of int32 arrays shaped like `q_pos`. A pair may be empty (`lo >= hi`),
            and pairs may overlap; 0 and 2**30 are ends without a bound. A mask of more than 32
            intervals per query is bounded by fewer: from above if `data`, else from below.
        """
        from maxattn.masks.algebra import bounded_spans

        pos = xp.asarray(q_pos, dtype=xp.int32)
        found = []
        for lo, hi in bounded_spans(self, pos, xp, data):
            ends = 0 if lo is None else lo, BIG if hi is None else hi
            clipped = (xp.clip(xp.asarray(end, dtype=xp.int32), 0, BIG) for end in ends)
            found.append(tuple(xp.broadcast_to(end, pos.shape) for end in clipped))
        return tuple(found)

    def block_map(self, block_q: int, block_kv: int, q_len: int, kv_len: int) -> np.ndarray:
        """Classify blocks of pairs as EMPTY (0), FULL (1) or MIXED (2).

        Masks without arrays and with up to 32 intervals per query are classified exactly. For other
        masks a block of uncertain kind is MIXED. No array of `q_len * kv_len` is made.

        Args:
            block_q, block_kv: numbers of queries and keys in a block.
            q_len, kv_len: numbers of queries and keys; the last blocks may be ragged.

        Returns:
            int8 `[ceil(q_len / block_q), ceil(kv_len / block_kv)]`.
        """
        return blocks.classify(self._bound(q_len, kv_len), block_q, block_kv, q_len, kv_len)

    def block_tally(
        self, block_q: int, block_kv: int, q_len: int, kv_len: int
    ) -> tuple[int, int, int]:
        """Count the blocks of `block_map` that are EMPTY, FULL and MIXED, without the array."""
        return blocks.tally(self._bound(q_len, kv_len), block_q, block_kv, q_len, kv_len)

    def allowed_pairs(self, q_len: int, kv_len: int) -> int:
        """Count the pairs that the mask allows; an upper bound unless `has_exact_intervals`."""
        return blocks.pairs(self._bound(q_len, kv_len), q_len, kv_len)

    def _bound(self, q_len: int, kv_len: int) -> Mask:
        return self if self.is_bound else self.bind(q_len, kv_len)

    def form(self) -> Self:
        """Return the mask with a shape and dtype for every array: hashable and comparable."""
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self)

    def leaf_axes(self) -> Self:
        """Return the mask with dim names, such as "BS", for every array; "1" is a dim of size 1."""
        return jax.tree.unflatten(jax.tree.structure(self), self._all_axes())

    def _all_axes(self) -> tuple[str, ...]:
        return sum((part._all_axes() for part in self.parts()), self.axes())

    def period(self) -> int | None:
        """Return the longest block length in tokens; None unless it is a multiple of all others."""
        found = {p for p in (self.own_period(), *(part.period() for part in self.parts())) if p}
        longest = max(found, default=0)
        return longest if longest and all(longest % p == 0 for p in found) else None

    def names(self, with_arrays: bool = False) -> tuple[str, ...]:
        """Return the joined masks' class names; if `with_arrays`, only of masks with arrays."""
        if not self.parts():
            return () if with_arrays and not self.has_data else (type(self).__name__,)
        return tuple(sorted({n for part in self.parts() for n in part.names(with_arrays)}))

    def terms(self) -> tuple[Mask, ...]:
        """Return the masks that `&` joins, or this mask alone if it is not joined by `&`."""
        return (self,)

    @property
    def is_full(self) -> bool:
        """Whether the mask allows every pair, whatever the lengths."""
        from maxattn.masks.algebra import Full

        return isinstance(self.canonical(), Full)

    @property
    def has_data(self) -> bool:
        """Whether the mask or one of its parts has an array."""
        return bool(jax.tree.leaves(self))

    @property
    def has_exact_intervals(self) -> bool:
        """Whether `intervals` is exact: no arrays, and at most 32 intervals per query."""
        from maxattn.masks.algebra import has_few_spans

        return not self.has_data and has_few_spans(self)

    def show(
        self, q_len: int, kv_len: int, width: int = 64, *, batch: int = 0, head: int = 0
    ) -> str:
        """Draw the mask with characters, queries downwards and keys to the right.

        Args:
            q_len, kv_len: numbers of queries and keys.
            width: most characters in a line, default 64; longer masks are drawn as shades.
            batch, head: the batch row and the head to draw, default 0.
        """
        from maxattn.masks.draw import show

        return show(self.bind(q_len, kv_len), q_len, kv_len, width, batch, head)

    def plot(
        self, path: str | Path, q_len: int, kv_len: int, *, batch: int = 0, head: int = 0
    ) -> Path:
        """Draw the mask into a PNG file, with matplotlib, and return its path; see `show`."""
        from maxattn.masks.draw import plot

        return plot(self.bind(q_len, kv_len), Path(path), q_len, kv_len, batch, head)

    # -- as a value --------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return False
        mine, shape = jax.tree.flatten(self)
        theirs, other_shape = jax.tree.flatten(other)
        return shape == other_shape and all(map(_same, mine, theirs))

    def __hash__(self) -> int:
        """Hash the structure; refuse a mask with arrays."""
        leaves, shape = jax.tree.flatten(self)
        if any(_is_array(x) for x in leaves):
            raise TypeError(f"{self} has arrays and cannot be hashed: hash its form()")
        return hash((shape, tuple(leaves)))

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle only the fields: a cached `identity` has the ids of the old arrays."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # pyright: ignore[reportArgumentType]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the arrays, and rebuild nested masks without recursion in Python."""
        return jax.tree.map(lambda x: deepcopy(x, memo), self)

    def __repr__(self) -> str:
        # The constructor call, without arguments at their default; arrays as dtype and shape.
        shown = ((f, getattr(self, f.name)) for f in fields(self))  # pyright: ignore[reportArgumentType]
        written = (
            text(value) if f.default is MISSING else f"{f.name}={text(value)}"
            for f, value in shown
            if value is not f.default
        )
        return f"{type(self).__name__}({', '.join(written)})"


def _checked(other: object) -> Mask:
    if isinstance(other, Mask):
        return other
    rule, remedy = "a mask combines only with masks", "write a bool array as Dense(...)"
    raise InputError("mask", text(other), rule, remedy)


def _is_array(x: object) -> bool:
    return isinstance(x, (np.ndarray, jax.Array))


def _same(a: object, b: object) -> bool:
    return a is b or (not _is_array(a) and not _is_array(b) and a == b)
