"""Cross-attention to texts of every length that models use: forward and gradients.

tests/block_sizes/test_compiles.py tests that the TPU compiler accepts them.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from tests.cases import draw_operands, judge_call
from tests.waiting import but

LENGTHS = (1, 77, 226, 257, 300, 333, 600, 1000, 1300)
# One token, several tiles, and a tile that is not full.
FEW = [*(("flash", n) for n in (1, 333, 1300)), ("tokamax_flash", 1300)]


@pytest.mark.parametrize(
    ("kernel", "length"), but(product(("flash", "tokamax_flash"), LENGTHS), FEW)
)
def test_forward_and_gradients(kernel: str, length: int) -> None:
    """77 queries and a text of `length` tokens; the second batch row has two thirds of them."""
    if kernel == "tokamax_flash":
        pytest.importorskip("tokamax")
    lengths = np.array([length, -(-2 * length // 3)], np.int32)
    config = ma.AttentionConfig(
        cross_attention=kernel, flash_block_sizes={"block_kv": 512, "block_kv_compute": 256}
    )
    mask, x = M.KeyPadding(lengths), draw_operands(b=2, t=77, s=length, n=2, k=2, h=64)
    call = partial(ma.attention, mask=mask, config=config, role="cross", return_lse=True)
    judge_call(call, x, mask)
