"""Segments with static lengths; test_in_kernels.py runs them in kernels."""

from __future__ import annotations

import pickle

import jax.numpy as jnp
import numpy as np

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.flash import Flash
from maxattn.kernels.splash import mask_codes
from maxattn.tools.cli.masks import read_mask


def test_equal_masks_are_equal_however_they_are_said() -> None:
    of = M.Segments.of_lengths
    assert of((4, 0, 3)) == of([4, 3], (4, 3)) == of(np.array([4, 3]))
    assert hash(of((4, 3))) == hash(of([4, 3])) and of((4, 3)) != of((3, 4))
    assert of((4, 3)) & of((4, 3)) == of((4, 3))
    assert of((4, 4, 3)).bind(11, 11) == M.BlockSlidingWindow(4, 1, 0)
    assert of((11,)).bind(11, 11) == M.Full()
    assert of((4, 7), (7, 4)).bind(11, 11) == of((4, 7), (7, 4))
    assert pickle.loads(pickle.dumps(of((4, 3)))) == of((4, 3))
    assert read_mask("segments:4,3+causal") == of((4, 3)) & M.Causal()


def test_what_is_written_is_short() -> None:
    assert str(M.Segments.of_lengths((512,) * 7 + (3,))) == "Segments.of_lengths((512 x 7, 3))"
    many = str(M.Segments.of_lengths(range(1, 1001)))
    assert many.endswith("8, ... 1000 segments of 500500 tokens))") and len(many) < 100


def test_millions_of_tokens_in_thousands_of_segments() -> None:
    """The counts are the sums over segments."""
    lengths = np.random.default_rng(0).integers(1, 9000, 4000)
    total = int(lengths.sum())
    assert total > 10**7
    mask = (M.Segments.of_lengths(lengths) & M.Causal()).bind(total, total)
    assert mask.allowed_pairs(total, total) == int((lengths * (lengths + 1) // 2).sum())
    empty, full, mixed = mask.block_tally(128, 128, total, total)
    blocks = -(-total // 128)
    assert empty + full + mixed == blocks**2
    across = -(-lengths // 128) + 1  # blocks that a segment can lie in
    assert blocks <= full + mixed <= (across * (across + 1) // 2).sum()


def test_a_kernel_goes_through_few_segments_by_arithmetic() -> None:
    """Inside a kernel arithmetic replaces the table, and gives equal results."""
    mask, at = M.Segments.of_lengths((5, 0, 9, 2), (3, 4, 0, 9)), np.arange(16, dtype=np.int32)
    code = mask_codes.Positions(mask, 16, 0)
    rows, keys = (jnp.asarray(x) for x in np.broadcast_arrays(at[:, None], at[None]))
    assert (np.asarray(code(rows, keys)) == np.asarray(mask.allowed(at, at))[0, 0]).all()


def test_splash_refuses_more_segments_than_it_goes_through() -> None:
    length = 2**20
    lengths = (length // 2, *(length // 2 // 128 - i % 2 * 2 + 1 for i in range(128)))
    call = ma.Call(1, length, length, 1, 1, 64, mask=M.Segments.of_lengths(lengths))
    reason = Flash.supports(call, ma.Target.named("TPU v5p"))
    assert reason is not None and "at most 64 segments" in reason.rule
    few = ma.Call(1, 4096, 4096, 1, 1, 64, mask=M.Segments.of_lengths((63, *range(1, 90), 28)))
    assert Flash.supports(few, ma.Target.named("TPU v5p")) is None
