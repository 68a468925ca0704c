"""The test of one pair inside FlashAttention-4's kernels (the library's `mask_mod`).

A pair is tested by a mask of positions, or by intervals, limits and ids in arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import and_, or_
from typing import Any

from maxattn.masks import Mask


@dataclass(frozen=True)
class PairTest:
    """Say how a pair is tested; hashable, since the kernel is compiled for it.

    Args:
        positions: a bound mask of positions that the kernel evaluates, or None where arrays hold
            what it allows.
        q_offset, kv_offset: positions of the first query and key, for `positions`.
        intervals: how many rows the arrays `lo` and `hi` [M, T] have; 0 for none.
        has_ids: whether ids of queries and keys [B, T], [B, S] must be equal.
        limits: whether keys end at a limit [B] of their batch row.
    """

    positions: Mask | None = None
    q_offset: int = 0
    kv_offset: int = 0
    intervals: int = 0
    has_ids: bool = False
    limits: bool = False

    def __call__(self, b: Any, q: Any, kv: Any, arrays: tuple[Any, ...], xp: Any) -> Any:
        """Tell whether query `q` of batch row `b` may attend to key `kv`.

        Args:
            b, q, kv: numbers of the kernel, or arrays that broadcast.
            arrays: `limits`, `lo`, `hi`, ids of queries, ids of keys; those that there are.
            xp: has the functions of numpy that masks of positions use.
        """
        found = []
        if self.has_spans:
            spans = self.spans(b, q, arrays, xp)
            found.append(reduce(or_, [_inside(kv, lo, hi) for lo, hi in spans], kv != kv))
        if self.has_ids:
            q_ids, kv_ids = arrays[-2:]
            found.append(q_ids[b, q] == kv_ids[b, kv])
        return reduce(and_, found)

    @property
    def has_spans(self) -> bool:
        """Whether intervals of keys are a part of the test."""
        return self.positions is not None or bool(self.intervals) or self.limits

    def spans(self, b: Any, q: Any, arrays: tuple[Any, ...], xp: Any) -> list[tuple[Any, Any]]:
        """Return the intervals of local keys that a query sees; None is an open end."""
        if not self.limits:
            return self._of_positions(q, arrays, xp)
        end, spans = arrays[0][b], [(None, None)]
        if self.positions is not None or self.intervals:
            spans = self._of_positions(q, arrays[1:], xp)
        return [(lo, end if hi is None else xp.minimum(hi, end)) for lo, hi in spans]

    def _of_positions(self, q: Any, arrays: tuple[Any, ...], xp: Any) -> list[tuple[Any, Any]]:
        if self.intervals:
            lo, hi = arrays[:2]
            return [(lo[m, q], hi[m, q]) for m in range(self.intervals)]
        assert self.positions is not None
        found = self.positions.spans(q + self.q_offset, xp, True)
        return [tuple(None if x is None else x - self.kv_offset for x in span) for span in found]  # pyright: ignore[reportReturnType]


def _inside(key: Any, lo: Any, hi: Any) -> Any:
    ends = [*([] if lo is None else [key >= lo]), *([] if hi is None else [key < hi])]
    return reduce(and_, ends) if ends else key == key
