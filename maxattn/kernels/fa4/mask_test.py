"""The test of pairs in mixed tiles, and how both passes evaluate it inside a kernel.

fa4-jax evaluates its `mask_mod` pair by pair. The forward here finds which of a thread's columns
are in a query's intervals, and sets the other scores to -inf: by a word of bits if the columns are
in order, else by two comparisons per score (a block window's forward takes 0.9 of the time, H200).
A backward would get slower this way, and tests each pair. Both passes read a key's id once for all
queries of a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial, reduce
from importlib import import_module
from operator import and_, or_
from typing import Any

from maxattn.masks import Mask


@dataclass(frozen=True)
class PairTest:
    """The test of a (query, key) pair; hashable, since a kernel is compiled for each test."""

    # a bound mask of positions that the kernel evaluates; None if the kernel reads intervals from
    # arrays, or tests ids alone
    positions: Mask | None = None
    # q_offset, kv_offset: positions of the first query and of the first key, for `positions`
    q_offset: int = 0
    kv_offset: int = 0
    # M of the arrays `lo` and `hi` [M, T] of key intervals; 0 without these arrays
    intervals: int = 0
    has_ids: bool = False  # whether the ids of query [B, T] and key [B, S] must be equal

    @property
    def has_spans(self) -> bool:
        """Whether intervals of keys are a part of the test."""
        return self.positions is not None or bool(self.intervals)

    def __call__(self, b: Any, q: Any, kv: Any, arrays: tuple[Any, ...], xp: Any) -> Any:
        """Return whether query `q` of batch row `b` may attend to key `kv`.

        Args:
            b, q, kv: indices, as numbers inside a kernel or as arrays that broadcast.
            arrays: lo, hi, query ids and key ids, without those that the test does not read.
            xp: the module of `where`, `minimum` and `maximum`; `Numbers` inside a kernel.
        """
        found = []
        if self.has_spans:
            inside = [_inside(kv, lo, hi) for lo, hi in self.spans(q, arrays, xp)]
            found.append(reduce(or_, inside, kv != kv))
        if self.has_ids:
            q_ids, kv_ids = arrays[-2:]
            found.append(q_ids[b, q] == kv_ids[b, kv])
        return reduce(and_, found)

    def spans(self, q: Any, arrays: tuple[Any, ...], xp: Any) -> list[tuple[Any, Any]]:
        """Return the intervals [start, end) of local keys that a query sees; None is unbounded."""
        if self.intervals:
            lo, hi = arrays[:2]
            return [(lo[m, q], hi[m, q]) for m in range(self.intervals)]
        assert self.positions is not None
        found, move = self.positions.spans(q + self.q_offset, xp, True), self.kv_offset
        return [tuple(None if x is None else x - move for x in span) for span in found]  # pyright: ignore[reportReturnType]


def _inside(key: Any, lo: Any, hi: Any) -> Any:
    ends = [*([] if lo is None else [key >= lo]), *([] if hi is None else [key < hi])]
    return reduce(and_, ends) if ends else key == key


# ---- inside a kernel -----------------------------------------------------------------------------


class Numbers:
    """The functions of numpy that masks and items need, for numbers inside a kernel."""

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        number = import_module("cutlass").Int32
        return number(_select()(condition, number(a), number(b)))

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        return import_module("cutlass").min(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        return import_module("cutlass").max(a, b)


def _select() -> Any:
    return import_module("cutlass.cutlass_dsl").select_


def mask_mod(test: PairTest) -> Callable[..., Any]:
    """Return the library's `mask_mod` for a test, with the test as its attribute `test`."""
    to_vector = import_module("fa4_jax.cute.utils").scalar_to_ssa
    boolean = import_module("cutlass").Boolean

    def allowed(b: Any, _head: Any, q: Any, kv: Any, _lengths: Any, arrays: Any) -> Any:
        return to_vector(test(b[0], q[0], kv[0], tuple(arrays or ()), Numbers), boolean)

    allowed.test = test
    return allowed


def bias_adder(own_batch: bool, own_heads: bool) -> Callable[..., Any]:
    """Return the library's `score_mod` that adds a bias to the scores, in float32.

    The library's backward computes no gradient of the bias.

    Args:
        own_batch, own_heads: whether each batch row, and each head, has its own bias.
    """
    to_vector = import_module("fa4_jax.cute.utils").scalar_to_ssa
    number = import_module("cutlass").Float32

    def add(scores: Any, b: Any, head: Any, **others: Any) -> Any:
        row, group = (b[0] if own_batch else 0), (head[0] if own_heads else 0)
        bias = others["aux_tensors"][0][row, group, others["q_idx"][0], others["kv_idx"][0]]
        return scores + to_vector(number(bias), number)

    return add


def tested_by_rows(masks: Any, forward: bool) -> Any:
    """Replace the mask class in the library's `partial` by one that masks a query's scores."""
    return partial(_row_mask(forward), *masks.args, **masks.keywords)


@cache
def _row_mask(forward: bool) -> Any:
    library, cute = import_module("fa4_jax.cute.mask"), import_module("cutlass.cute")

    class RowMask(library.AttentionMask):
        def apply_mask_mod_sm80(self, scores: Any, coordinates: Any, *rest: Any) -> None:
            first, row, column, offset, batch, _, m_block, n_block, mask_seqlen, mod, aux, *_ = rest
            test: PairTest = mod.test
            if not forward and (test.has_spans or not test.has_ids):
                super().apply_mask_mod_sm80(scores, coordinates, *rest)
                return
            start = _number(offset + n_block * self.tile_n)
            columns = [first[0, c][column] for c in range(cute.size(coordinates.shape[1]))]
            rows = range(cute.size(coordinates.shape[0]))
            queries = [_number(coordinates[r, 0][row] + m_block * self.tile_m) for r in rows]
            arrays = tuple(aux.tensors or ())
            if test.has_ids:
                _keep_ids(scores, (batch, queries), (start, columns), arrays[-2:])
            if not test.has_spans:
                return
            end = self.seqlen_k - start if mask_seqlen else None
            in_order = column == 1 and library._cols_match_r2p(first, column)
            for r, query in enumerate(queries):
                spans = [_from(s, start, end) for s in test.spans(query, arrays, Numbers)]
                if in_order:
                    bits = partial(_bits, library, spans)
                    library.mask_r2p_lambda(scores[r, None], bits, rank1=True)
                else:
                    _keep_columns(scores, r, columns, spans)

    return RowMask


def _number(coordinate: Any) -> Any:
    """Convert a coordinate, whose division rounds toward 0, to Int32, whose division floors."""
    utils, number = import_module("fa4_jax.cute.utils"), import_module("cutlass").Int32
    return number(utils.ssa_to_scalar(utils.scalar_to_ssa(coordinate, number)))


def _keep_ids(scores: Any, queries: Any, keys: Any, ids: Any) -> None:
    """Set scores of unequal ids to -inf; ids past the last query and key equal no other id."""
    (batch, rows), (start, columns), (of_queries, of_keys) = queries, keys, ids
    wanted = [of_queries[batch, query] for query in rows]
    for c, at in enumerate(columns):
        key = of_keys[batch, start + at]
        for r, query in enumerate(wanted):
            _keep(scores, r, c, key == query)


def _keep(scores: Any, r: int, c: int, keeps: Any) -> None:
    number = import_module("cutlass").Float32
    scores[r, c] = number(_select()(keeps, scores[r, c], -number.inf))


def _from(span: tuple[Any, Any], start: Any, end: Any) -> tuple[Any, Any]:
    """Make an interval relative to `start`, and clip it to `end`; None is unbounded."""
    lo, hi = (None if x is None else x - start for x in span)
    if end is not None:
        hi = end if hi is None else Numbers.minimum(hi, end)
    return lo, hi


def _bits(library: Any, spans: list[tuple[Any, Any]], chunk: int) -> Any:
    """Return a word with the bits of those of 32 columns that are in an interval."""
    cutlass = import_module("cutlass")

    def at(end: Any) -> Any:
        # An end before the first column is moved to that column, which changes no bit: numbers
        # that are never negative divide faster.
        return library.sm90_col_to_r2p_idx(Numbers.maximum(cutlass.Int32(end), 0))

    found = cutlass.Uint32(0)
    for lo, hi in spans:
        above = (
            cutlass.Uint32(0xFFFFFFFF) if lo is None else library.r2p_bitmask_above(at(lo), chunk)
        )
        found |= above if hi is None else above & library.r2p_bitmask_below(at(hi), chunk)
    return found


def _keep_columns(scores: Any, r: int, columns: list[int], spans: list[tuple[Any, Any]]) -> None:
    """Set the scores of row r to -inf outside the intervals, column by column."""
    boolean = import_module("cutlass").Boolean
    for c, at in enumerate(columns):
        inside = (boolean(_inside(at, lo, hi)) for lo, hi in spans)
        _keep(scores, r, c, reduce(or_, inside, boolean(False)))
