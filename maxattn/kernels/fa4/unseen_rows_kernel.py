"""The CuTe kernel that writes zeros over the gradients of queries that see nothing.

A thread reads the LSE of one query and head; a warp goes through those of its 32 threads that are
-inf, and writes zeros over their channels together. Where every query sees a key, it reads the LSE
and writes nothing.

CuTe comes with fa4-jax: this file is imported where a kernel is compiled.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")

WARP = 32
QUERIES = 128  # of a thread block, of one head


class UnseenRows:
    """Write zeros over rows of dout [B,T,N,H], in place, whose LSE [B,N,T] is -inf."""

    @cute.jit
    def __call__(self, dout: Any, lse: Any, stream: Any) -> None:
        """Launch it."""
        batch, queries, heads, _ = dout.shape
        blocks = batch * heads * cute.ceil_div(queries, QUERIES)
        work = self.kernel(dout, lse)
        work.launch(grid=[blocks, 1, 1], block=[QUERIES, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, dout: Any, lse: Any) -> None:
        """Take the queries of a thread block."""
        batch, queries, heads, _ = dout.shape
        at, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        head, row, part = at % heads, at // heads % batch, at // (heads * batch)
        query = part * QUERIES + thread
        found = cutlass.Float32(0.0)
        if query < queries:
            found = lse[row, head, query]
        unseen = cutlass.Int32(found == -cutlass.Float32.inf)
        if cute.arch.vote_any_sync(unseen != 0):
            self.clear_rows(dout, (row, head, query - cute.arch.lane_idx()), unseen)

    @cute.jit
    def clear_rows(self, dout: Any, first: Any, unseen: Any) -> None:
        """Write zeros over the queries of a warp that see nothing; `first` says where it begins."""
        (row, head, query), lane = first, cute.arch.lane_idx()
        for other in cutlass.range(WARP, unroll=1):
            if cute.arch.shuffle_sync(unseen, other) != 0:
                for step in cutlass.range_constexpr(-(-dout.shape[3] // WARP)):
                    channel = step * WARP + lane
                    if channel < dout.shape[3]:
                        dout[row, query + other, head, channel] = dout.element_type(0.0)
