"""The test of mixed tiles inside FlashAttention-4's kernels: many scores at a time.

The library tests each pair. Here a thread works out where the intervals of its rows lie among its
own columns, and keeps the scores inside: a whole row from a word of bits where its columns are in
order, else by two comparisons a score. That saves a tenth of a block window's forward (H200). The
backward would get slower, and tests each pair. Ids of keys are read once for all rows of a thread,
in both passes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial, reduce
from importlib import import_module
from operator import and_, or_
from typing import Any

from maxattn.kernels.fa4.mask_mod import PairTest


def pair_test(test: PairTest) -> Callable[..., Any]:
    """Write a test in the form that the kernels call.

    Its attribute `spans` gives a query's intervals, where those are the whole test.
    """
    to_vector = import_module("fa4_jax.cute.utils").scalar_to_ssa
    boolean = import_module("cutlass").Boolean

    def allowed(b: Any, _head: Any, q: Any, kv: Any, _lengths: Any, arrays: Any) -> Any:
        return to_vector(test(b[0], q[0], kv[0], tuple(arrays or ()), Numbers), boolean)

    def spans(b: Any, q: Any, arrays: Any) -> list[tuple[Any, Any]]:
        return test.spans(b, q, tuple(arrays or ()), Numbers)

    allowed.spans = spans if test.has_spans else None
    allowed.has_ids = test.has_ids
    return allowed


class Numbers:
    """Give launch orders and masks numpy's functions, on numbers of a kernel."""

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        """Choose one of two numbers."""
        number, select = import_module("cutlass").Int32, _select()
        return number(select(condition, number(a), number(b)))

    @staticmethod
    def minimum(a: Any, b: Any) -> Any:
        """Take the smaller one."""
        return import_module("cutlass").min(a, b)

    @staticmethod
    def maximum(a: Any, b: Any) -> Any:
        """Take the larger one."""
        return import_module("cutlass").max(a, b)


def _select() -> Any:
    return import_module("cutlass.cutlass_dsl").select_


def by_rows(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Exchange the library's mask for ours among the operands of a method of the forward."""
    return _exchanged(operands, _row_mask())


def by_ids(operands: tuple[Any, ...]) -> tuple[Any, ...]:
    """Exchange it in the backward, for tests of ids alone."""
    return _exchanged(operands, _ids_mask())


def _exchanged(operands: tuple[Any, ...], ours: Any) -> tuple[Any, ...]:
    library_class = import_module("fa4_jax.cute.mask").AttentionMask

    def exchanged(x: Any) -> Any:
        found = isinstance(x, partial) and x.func is library_class
        return partial(ours, *x.args, **x.keywords) if found else x

    return tuple(exchanged(x) for x in operands)


@cache
def _ids_mask() -> Any:
    library, cute = import_module("fa4_jax.cute.mask"), import_module("cutlass.cute")

    class IdsMask(library.AttentionMask):
        def apply_mask_mod_sm80(self, scores: Any, coordinates: Any, *rest: Any) -> None:
            first, row, column, offset, batch, _, m_block, n_block, _, mask_mod, aux_data, *_ = rest
            if mask_mod.spans is not None or not mask_mod.has_ids:
                super().apply_mask_mod_sm80(scores, coordinates, *rest)
                return
            rows, columns = (range(cute.size(n)) for n in coordinates.shape)
            at = [_number(coordinates[r, 0][row] + m_block * self.tile_m) for r in rows]
            start = _number(offset + n_block * self.tile_n)
            places = [first[0, c][column] for c in columns]
            _by_ids(scores, batch, at, (start, places), aux_data.tensors)

    return IdsMask


@cache
def _row_mask() -> Any:
    library, cute = import_module("fa4_jax.cute.mask"), import_module("cutlass.cute")

    class RowMask(library.AttentionMask):
        def apply_mask_mod_sm80(
            self,
            scores: Any,
            coordinates: Any,
            first: Any,
            row: int,
            column: int,
            offset: Any,
            batch: Any,
            head: Any,
            m_block: Any,
            n_block: Any,
            mask_seqlen: bool,
            mask_mod: Any,
            aux_data: Any,
            fastdiv_mods: Any = None,
        ) -> None:
            start = _number(offset + n_block * self.tile_n)
            columns = [first[0, c][column] for c in range(cute.size(coordinates.shape[1]))]
            in_order = column == 1 and library._cols_match_r2p(first, column)
            rows = range(cute.size(coordinates.shape[0]))
            queries = [_number(coordinates[r, 0][row] + m_block * self.tile_m) for r in rows]
            if mask_mod.has_ids:
                _by_ids(scores, batch, queries, (start, columns), aux_data.tensors)
            for r, query in enumerate(queries if mask_mod.spans else ()):
                spans = mask_mod.spans(batch, query, aux_data.tensors)
                end = self.seqlen_k - start if mask_seqlen else None
                spans = [_from(span, start, end) for span in spans]
                if in_order:
                    library.mask_r2p_lambda(
                        scores[r, None], partial(_bits, library, spans), rank1=True
                    )
                else:
                    _by_column(scores, r, columns, spans)

    return RowMask


def _by_ids(
    scores: Any, batch: Any, queries: list[Any], keys: tuple[Any, list[int]], arrays: Any
) -> None:
    """Keep the keys that have the id of their row's query.

    Ids past the last query and the last key are no other's.

    Args:
        scores: of a thread's own rows and columns.
        batch: row.
        queries: of each row of scores.
        keys: where the columns begin, and where each is from there.
        arrays: of the test; ids of queries and of keys are the last ones.
    """
    cutlass, select = import_module("cutlass"), _select()
    (of_queries, of_keys), (start, columns) = arrays[-2:], keys
    ids = [of_queries[batch, query] for query in queries]
    for c, at in enumerate(columns):
        key = of_keys[batch, start + at]
        for r, query in enumerate(ids):
            scores[r, c] = cutlass.Float32(select(key == query, scores[r, c], -cutlass.Float32.inf))


def _number(coordinate: Any) -> Any:
    """Make a number of a coordinate: division rounds a coordinate to 0, and a number down."""
    utils, number = import_module("fa4_jax.cute.utils"), import_module("cutlass").Int32
    return number(utils.ssa_to_scalar(utils.scalar_to_ssa(coordinate, number)))


def _from(span: tuple[Any, Any], start: Any, end: Any) -> tuple[Any, Any]:
    """Count an interval from `start`, and end it at `end`; None is open."""
    lo, hi = (None if x is None else x - start for x in span)
    if end is not None:
        hi = end if hi is None else Numbers.minimum(hi, end)
    return lo, hi


def _bits(library: Any, spans: list[tuple[Any, Any]], chunk: int) -> Any:
    """Set the bit of each of 32 columns that is in an interval."""
    cutlass = import_module("cutlass")

    def at(end: Any) -> Any:
        # An end before the first column keeps what one at it keeps; a number that is never negative
        # is divided sooner.
        return library.sm90_col_to_r2p_idx(Numbers.maximum(cutlass.Int32(end), 0))

    inside = []
    for lo, hi in spans:
        ends = [] if lo is None else [library.r2p_bitmask_above(at(lo), chunk)]
        ends += [] if hi is None else [library.r2p_bitmask_below(at(hi), chunk)]
        inside.append(reduce(and_, ends) if ends else cutlass.Uint32(0xFFFFFFFF))
    return reduce(or_, inside) if inside else cutlass.Uint32(0)


def _by_column(scores: Any, r: int, columns: list[int], spans: list[tuple[Any, Any]]) -> None:
    """Keep what is in an interval of row r, column by column."""
    cutlass, select = import_module("cutlass"), _select()
    for c, at in enumerate(columns):
        inside = []
        for lo, hi in spans:
            ends = [*([] if lo is None else [lo <= at]), *([] if hi is None else [hi > at])]
            inside.append(reduce(and_, ends) if ends else cutlass.Boolean(True))
        keeps = reduce(or_, inside) if inside else cutlass.Boolean(False)
        scores[r, c] = cutlass.Float32(select(keeps, scores[r, c], -cutlass.Float32.inf))
