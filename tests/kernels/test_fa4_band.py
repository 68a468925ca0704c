"""What FlashAttention-4 computes of a mask without block-sparse lists, and that a plan says so."""

from __future__ import annotations

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.fa4 import band, mask_inputs
from maxattn.kernels.fa4.kernel import Fa4

BANDED = (M.BlockSlidingWindow(16, 3), M.BlockCausal(12), M.Causal() | M.KeyLimit(5), ~M.Causal(),
          M.LocalWindow(9, 2), M.BlockSlidingWindow(16, 3) & M.KeyLimit(40),
          ~M.LocalWindow(300, 300))  # fmt: skip


@pytest.mark.parametrize("mask", BANDED, ids=str)
@pytest.mark.parametrize("lengths", [(64, 64), (48, 96), (33, 33)])
def test_the_shares_of_a_band_are_those_of_the_pairs(
    mask: M.Mask, lengths: tuple[int, int]
) -> None:
    t, s = lengths
    bound = mask.bind(t, s)
    allowed = np.broadcast_to(
        np.asarray(bound.allowed(np.arange(t), np.arange(s), 0, 0)), (1, 1, t, s)
    )
    i, j = np.nonzero(allowed[0, 0])
    left, right = ((i - j).max(), (j - i).max()) if i.size else (-1, -1)
    left, right = (side if side >= 0 else t + s for side in (left, right))
    apart = np.arange(s)[None] - np.arange(t)[:, None]
    computed = ((-left <= apart) & (apart <= right)).sum()
    found = band.shares(ma.Call(1, t, s, 1, 1, 64, "bfloat16", mask=bound))
    assert found == (computed / (t * s), i.size / (t * s))


def test_the_band_is_the_one_that_the_kernel_gets() -> None:
    for mask in BANDED:
        bound = mask.bind(64, 64)
        lo, hi = mask_inputs._ends(bound, (64, 64), (0, 0), np)
        piece = mask_inputs._around(lo, hi, 64, 64)
        apart = np.arange(64)[None] - np.arange(64)[:, None]
        computed = np.ones((64, 64), bool)
        computed &= apart >= -(64 if piece.left is None else piece.left)
        computed &= apart <= (64 if piece.right is None else piece.right)
        found = band.shares(ma.Call(1, 64, 64, 1, 1, 64, "bfloat16", mask=bound))
        assert found.computed == computed.mean()


@pytest.mark.parametrize("kind", ["A100", "B200", "GB300", "RTX 5080"])
def test_what_is_computed_without_need_is_noted(kind: str) -> None:
    target = ma.Target.named(kind, (("fa4-jax", "0.1.0"),))
    for mask in (M.BlockSlidingWindow(256, 4), M.BlockCausal(256), M.Causal() | M.KeyLimit(9)):
        call = ma.Call(1, 4096, 4096, 8, 8, 64, "bfloat16", mask=mask.bind(4096, 4096))
        (note,) = Fa4.build(call, ma.AttentionConfig(), target).notes(
            call, ma.AttentionConfig(), target
        )
        assert "on Hopper GPUs alone" in note and f"{100 * band.shares(call).computed:.3g}%" in note
    for mask in (M.Full(), M.Causal().bind(4096, 4096)):  # whose empty tiles every GPU skips
        call = ma.Call(1, 4096, 4096, 8, 8, 64, "bfloat16", mask=mask)
        assert not Fa4.build(call, ma.AttentionConfig(), target).notes(
            call, ma.AttentionConfig(), target
        )
