"""FlashAttention-4 at head dims above 128 on a Hopper GPU, against float64: none is padded.

Bands that other kernels are given in parts, or without the queries that see nothing, run at shorter
ones too.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn import masks as M
from tests.gpu.test_block_sparse_on_gpu import skip_without_block_sparse
from tests.gpu.test_row_lists_on_gpu import both, judge, operands

pytestmark = pytest.mark.gpu

IDS = np.repeat(np.arange(4), (300, 1, 500, 199))[None].astype(np.int32)
MASKS: dict[str, tuple[M.Mask, int, int]] = {
    "all pairs": (M.Full(), 1000, 1000),
    "long": (M.Full(), 1400, 4000),  # more tiles of keys than the first of which writes dQ
    "few keys": (M.Full(), 3000, 300),
    "one tile of keys": (M.Full(), 3000, 60),
    "one tile of keys, split": (M.Full(), 20000, 77),
    "few queries": (M.Full(), 64, 1500),
    "causal": (M.Causal(), 1000, 1000),
    "causal, fewer queries": (M.Causal(), 300, 1000),
    "causal, few queries": (M.Causal(), 70, 1500),
    "causal, long": (M.Causal(), 1900, 5000),
    "window": (M.LocalWindow(100, 31), 1000, 1000),
    "window, queries that see nothing": (M.LocalWindow(100, 31, offset=-40), 1000, 300),
    "lengths": (M.KeyPadding(np.array([700, 0], np.int32)), 900, 1000),
    "lengths, one tile of keys": (M.KeyPadding(np.array([60, 7], np.int32)), 900, 64),
    "segments": (M.Segments(IDS, IDS), 1000, 1000),
    "known segments": (M.Segments.of_lengths((300, 1, 500, 199)), 1000, 1000),
    "block window": (M.BlockSlidingWindow(150, 2), 1000, 1000),
}
ONE_LAUNCH = [
    "causal, fewer queries",
    "causal, few queries",
    "causal, long",
    "window, queries that see nothing",
]
CASES = [
    *((name, "bfloat16", 160, (2, 2)) for name in MASKS),
    *((name, "bfloat16", 192, (2, 2)) for name in MASKS),
    *((name, "bfloat16", 256, (2, 2)) for name in MASKS),
    *((name, "bfloat16", 144, (4, 2)) for name in MASKS),
    *((name, "float16", h, (2, 2)) for name in MASKS for h in (136, 224)),
    *((name, "bfloat16", h, (4, 2)) for name in ONE_LAUNCH for h in (64, 96, 128)),
]


@pytest.mark.parametrize(("name", "dtype", "head_dim", "heads"), CASES)
def test_against_float64(name: str, dtype: str, head_dim: int, heads: tuple[int, int]) -> None:
    skip_without_block_sparse()
    mask, t, s = MASKS[name]
    x = operands(t, s, head_dim, heads, dtype)
    judge(jax.jit(both)(mask, *x.values()), x, mask, dtype)


def test_the_next_head_is_read_by_none() -> None:
    """A kernel's tiles of 192 channels would reach from the first head into the second."""
    skip_without_block_sparse()
    x = operands(700, 700, 160, (2, 2), "bfloat16")
    mask, first = M.Causal(), {name: v[:, :, :1] for name, v in x.items()}
    out, lse, *grads = jax.jit(both)(mask, *(v.at[:, :, 1].set(jnp.nan) for v in x.values()))
    judge((out[:, :, :1], lse[:, :1], *(g[:, :, :1] for g in grads)), first, mask, "bfloat16")


@pytest.mark.parametrize("name", ["all pairs", "long", "causal", "causal, few queries", "segments"])
def test_under_vmap(name: str) -> None:
    skip_without_block_sparse()
    mask, t, s = MASKS[name]
    x = operands(t, s, 160, (4, 2), "bfloat16")
    found = jax.jit(jax.vmap(partial(both, mask)))(*(v[:, None] for v in x.values()))
    judge([y[:, 0] for y in found], x, mask, "bfloat16")
