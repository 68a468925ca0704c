"""FlashAttention-4's backward over all pairs, on Hopper GPUs: few keys and few queries apart."""

from __future__ import annotations

from functools import partial

from maxattn.kernels.base import Grads, Rows, with_batch_folded
from maxattn.kernels.fa4 import block_sparse, first_writes, one_key_tile, split_queries
from maxattn.kernels.fa4.tile_sizes import narrow_tile
from maxattn.kernels.fused.rectangles import PieceInputs


def backward(inputs: PieceInputs, rows: Rows, scale: float, sms: int) -> Grads:
    """Return (dq, dk, dv) over all pairs from a given output and LSE.

    Args:
        inputs: bfloat16 or float16; all its pairs are allowed.
        rows: of the queries.
        scale: multiplies the scores.
        sms: streaming multiprocessors (SMs) of the GPU.
    """
    for way in (one_key_tile, first_writes):
        if way.takes(inputs):
            return way.backward(inputs, rows, scale, sms)
    tile = narrow_tile(inputs.q.shape[3], inputs.q.shape[1])
    if tile is None:
        return split_queries.backward(inputs, rows, scale, sms)
    narrow = block_sparse.TilePass(tile, scale)
    return with_batch_folded(partial(block_sparse.backward, tiles=narrow), inputs, rows)
