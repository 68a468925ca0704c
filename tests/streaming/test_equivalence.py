"""Blocks computed one by one with a cache equal one forward under the teacher-forcing mask.

test_drawn.py draws windows, sinks and positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from tests.streaming.stack import Stack, clips, close, rollout, teacher_forward

WITHIN = {"float32": 1e-5, "bfloat16": 0.05}


@pytest.mark.parametrize("dtype", WITHIN)
def test_every_block_is_that_of_teacher_forcing(dtype: str) -> None:
    """With few key heads, and with frames that leave the window."""
    stream = ma.Stream(2, 3, 2, sink=1, first_frame_alone=dtype == "float32")
    stack = Stack.make(kv_heads=2, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    stack = stack._replace(state=jax.tree.map(lambda x: x.astype(dtype), stack.state))
    clean, noisy = (x.astype(jnp.dtype(dtype)) for x in clips(stream, stream.first_block + 9, 2))
    cache = stack.cache(stream, 2, kv_heads=2, dtype=dtype)
    made = rollout(stack, stream, cache, clean, noisy)
    want_clean, want_noisy = teacher_forward(stack, stream, clean, noisy)
    for got, want in ((made.clean, want_clean), (made.noisy, want_noisy)):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.abs(got - want).max() < WITHIN[dtype] * np.abs(want).max()
    assert made.programs <= 3


def test_the_number_of_the_first_frame_changes_nothing() -> None:
    """The host computes tables in float64, so angles at frame 50,000 are as exact as at frame 0."""
    stream, stack = ma.Stream(2, 3, 2, sink=1), Stack.make()
    clean, noisy = clips(stream, 12)
    early, late = (
        rollout(stack, stream, stack.cache(stream), clean, noisy, first) for first in (0, 50_000)
    )
    close(late.clean, early.clean, atol=1e-4)
    close(late.noisy, early.noisy, atol=1e-4)
