"""How much VMEM the kernels of `tpu_flash` take, bounded from above.

Operands and results are there twice, since one is fetched or written while the other is used; sums
are there once. Scores and weights of the keys computed at once spill.
"""

from __future__ import annotations

from maxattn.block_sizes.sizes import LANES, SUBLANES, Facts, round_up

FLOAT = 4  # bytes
SCORES = {2: 14, 4: 48}
"""Bytes of what the backward keeps of a pair, by bytes of an element, fitted from above to what the
compiler needs: scores, weights, their gradients and the mask, and the parts of float32 products."""
ROWS = 2 * SUBLANES * FLOAT  # bytes of one token's value in a row that is there twice


def forward_bytes(tile: tuple[int, int, int], facts: Facts) -> float:
    """Bound the bytes of the forward."""
    q, kv, compute = tile
    head = round_up(facts.head_dim, LANES)
    windows = 4 * (q + kv) * head * facts.itemsize + q * head * FLOAT
    # ids, codes, LSE, and the sums l and m; ids of keys
    rows = (4 * ROWS + 2 * SUBLANES * FLOAT) * q + ROWS * kv
    return windows + rows + (FLOAT + facts.itemsize) * q * compute


def backward_bytes(tile: tuple[int, int, int], facts: Facts) -> float:
    """Bound the bytes of the backward."""
    q, kv, compute = tile
    head, item = round_up(facts.head_dim, LANES), facts.itemsize
    # q and dout twice; dQ as it was and as it is, and what is added to it
    queries = 4 * q * head * item + 3 * q * head * FLOAT + 4 * ROWS * q
    # k and v twice, k transposed; dK and dV: sums, and results twice
    keys = 5 * kv * head * item + 6 * kv * head * FLOAT + ROWS * kv
    return queries + keys + SCORES[item] * q * compute
