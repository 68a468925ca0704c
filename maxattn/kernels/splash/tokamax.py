"""The kernels of tokamax's splash attention on one batch row, with a natural-log LSE.

The schedule lists the tiles to visit, tile row by tile row. Only tiles marked as mixed evaluate the
mask. If a query tile visits no key tile, the kernel writes no output for its queries, and `forward`
sets their LSE to -inf. The backward visits every tile of its grid.

With `base2`, the kernels multiply queries by log2(e), compute exp2 and return the LSE in base 2.
maxattn converts the LSE after the forward and back before the backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.jax_private.tokamax import library
from maxattn.kernels.softmax import LOG2E, NEG_INF
from maxattn.kernels.splash.calls import Blocks, Library, Operands, Setup, Stats
from maxattn.kernels.splash.scalar_memory import column_type
from maxattn.masks import EMPTY, FULL

MOST_STEPS = 2**16  # the lists take 13 bytes per step, and scalar memory has 1 MiB
PARTIAL, WHOLE = 1, 2  # tokamax's marks of a tile: evaluate the mask, or do not


@dataclass(frozen=True)
class TokamaxSplash(Library):
    """Call tokamax's kernels."""

    interpret: bool  # whether to run in Pallas' interpreter
    base2: bool  # whether to compute the softmax with exp2
    scheduler: bool  # whether the forward uses the TPU compiler's experimental scheduler

    def query_factor(self, dtype: Any) -> float:
        """Return the factor that undoes the rounding of `base2`'s log2(e): 0.18% in bfloat16."""
        return LOG2E / float(np.asarray(LOG2E, dtype)) if self.base2 else 1.0

    def forward(self, row: Operands, setup: Setup, blocks: Blocks) -> tuple[Array, Array]:
        out, stats = library()._splash_attention_forward(
            _forward_info(setup),
            *_with_ids(row),
            None,
            save_residuals=True,
            fwd_mask_sparsity=_share(setup),
            **self._settings(setup, blocks),
        )
        lse = stats["logsumexp"] / LOG2E if self.base2 else stats["logsumexp"]
        visited = jnp.repeat(jnp.asarray(setup.kinds != EMPTY).any(axis=1), blocks[0])
        return out, jnp.where(visited[None], lse, NEG_INF)

    def dkv(
        self, row: Operands, stats: Stats, setup: Setup, blocks: Blocks, fused: bool
    ) -> tuple[Array | None, Array, Array]:
        assert fused, "tokamax has no other backward"
        stats = stats._replace(lse=stats.lse * LOG2E) if self.base2 else stats
        bq, bkv, compute = blocks
        return library()._splash_attention_bwd_dkv(
            *_with_ids(row),
            *stats,
            **{"bq": bq, "bkv": bkv, "bkv_compute": compute},
            mask_info=_backward_info(setup),
            dkv_mask_sparsity=_share(setup),
            **self._settings(setup, blocks),
        )

    def _settings(self, setup: Setup, blocks: Blocks) -> dict[str, Any]:
        config = library().SplashConfig(
            *blocks,
            *blocks,
            use_base2_exp=self.base2,
            use_experimental_scheduler=self.scheduler,
            interpret=self.interpret,
        )
        value = library().base.DEFAULT_MASK_VALUE
        code = {"mask_value": value, "mask_function": setup.code}
        return {"is_mqa": False, "config": config, **code}


def _with_ids(row: Operands) -> tuple[Any, Any, Any, Any]:
    return row.q, row.k, row.v, None if row.ids is None else library().SegmentIds(*row.ids)


def _share(setup: Setup) -> float:
    """Return the share of visited tiles, for the compiler's cost estimate; 1 if unknown."""
    return float((setup.kinds != EMPTY).mean()) if isinstance(setup.kinds, np.ndarray) else 1.0


def marks_of(setup: Setup) -> Any:
    """Mark each tile [query tiles, key tiles]: 0 empty, PARTIAL if the mask is tested, or WHOLE."""
    xp: Any = np if isinstance(setup.kinds, np.ndarray) else jnp
    whole = setup.kinds == FULL
    if setup.shows_padding:
        whole = whole & (xp.arange(whole.shape[1]) < whole.shape[1] - 1)[None]
    return xp.where(setup.kinds == EMPTY, 0, xp.where(whole, WHOLE, PARTIAL)).astype(np.int8)


def steps(marks: Any) -> tuple[Any, Any, Any, Any]:
    """List the tiles to visit, by tile rows: (rows, columns, marks, count), padded with -1."""
    if isinstance(marks, np.ndarray):
        row, column = np.nonzero(marks) if marks.any() else (np.zeros(1, int), np.zeros(1, int))
        small, count = column_type(max(marks.shape)), np.array([row.shape[0]], np.int32)
        marked = np.maximum(marks[row, column], PARTIAL)
        return row.astype(small), column.astype(small), marked, count
    rows, columns = marks.shape
    row, column = (jnp.asarray(x.reshape(-1), jnp.int32) for x in np.mgrid[:rows, :columns])
    idle = (marks == 0).reshape(-1).astype(jnp.int32)
    # A stable sort puts visited tiles first; a gather of long lists is slow or not lowered.
    idle, row, column, flat = jax.lax.sort(
        (idle, row, column, marks.reshape(-1)), num_keys=1, is_stable=True
    )
    row, column = (jnp.where(idle == 1, -1, x) for x in (row, column))
    return row, column, flat, (idle == 0).sum(dtype=jnp.int32)[None]


def _forward_info(setup: Setup) -> Any:
    marks = marks_of(setup)
    if isinstance(marks, np.ndarray) and np.count_nonzero(marks) > MOST_STEPS:
        return _info(setup)  # the grid has all tiles, by tile rows, and each evaluates the mask
    return _info(setup, *(jnp.asarray(x) for x in steps(marks)))


def _backward_info(setup: Setup) -> Any:
    if setup.codes is None:
        return _info(setup)
    # Without lists, the grid has every query tile of each key tile; tiles marked 0 are idle.
    return _info(setup, marks=jnp.asarray(marks_of(setup).T.reshape(-1)))


def _info(
    setup: Setup, rows: Any = None, columns: Any = None, marks: Any = None, count: Any = None
) -> Any:
    values = None if setup.codes is None else setup.codes.padded(setup.padded[0])
    return library().MaskInfo(None, rows, columns, marks, count, None, values)
