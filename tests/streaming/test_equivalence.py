"""Blocks made one by one with a cache equal one forward under the teacher-forcing mask."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from tests.pairwise import pairwise, product
from tests.streaming.stack import Stack, clips, close, rollout, teacher_forward
from tests.waiting import but, enough

AXES = {"window": (None, 2, 4), "sink": (0, 1, 3), "size": (1, 3, 5), "alone": (False, True)}


def fits(case: dict) -> bool:
    """Return whether the sink is inside of a window, and leaves room for a block."""
    if case["window"] is None:
        return case["sink"] == 0
    return case["sink"] <= (case["window"] - 1) * case["size"]


def name(case: dict) -> str:
    return "-".join(f"{key}_{value}" for key, value in case.items())


def stream_of(case: dict) -> ma.Stream:
    return ma.Stream(2, case["size"], case["window"], case["sink"], case["alone"])


def frames_of(stream: ma.Stream) -> int:
    """Make three times as many frames as the cache holds, or seven blocks."""
    wanted = 3 * (stream.budget or 0) or 7 * stream.frames_per_block
    return next(n for n in range(wanted, 2 * wanted + 9) if stream.ends_block(n))


def check(case: dict) -> None:
    stream, stack = stream_of(case), Stack.make()
    frames = frames_of(stream)
    clean, noisy = clips(stream, frames)
    cache = stack.cache(stream, frames=None if stream.window else frames)
    made = rollout(stack, stream, cache, clean, noisy)
    want_clean, want_noisy = teacher_forward(stack, stream, clean, noisy)
    close(made.clean, want_clean)
    close(made.noisy, want_noisy)
    assert made.programs <= 3


SMALL = enough(pairwise(AXES, fits), ("window", "alone"))


@pytest.mark.parametrize("case", but(product(AXES, fits), SMALL), ids=name)
def test_every_block_is_that_of_teacher_forcing(case: dict) -> None:
    check(case)


def test_bfloat16_and_fewer_key_heads_within_their_rounding() -> None:
    stream, bf16 = ma.Stream(2, 3, 2, sink=1), jnp.bfloat16
    stack = Stack.make(kv_heads=2, dtype=bf16, param_dtype=bf16)
    stack = stack._replace(state=jax.tree.map(lambda x: x.astype(bf16), stack.state))
    clean, noisy = (x.astype(bf16) for x in clips(stream, 9, batch=2))
    cache = stack.cache(stream, 2, kv_heads=2, dtype="bfloat16")
    made = rollout(stack, stream, cache, clean, noisy)
    want_clean, want_noisy = teacher_forward(stack, stream, clean, noisy)
    for got, want in ((made.clean, want_clean), (made.noisy, want_noisy)):
        got, want = (np.asarray(x, np.float32) for x in (got, want))
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


# ---- rotary embedding ----------------------------------------------------------------------------


def test_the_number_of_the_first_frame_changes_nothing() -> None:
    """Tables come from the host, in float64: frame 50,000 turns by as exact an angle as frame 0."""
    stream, stack = ma.Stream(2, 3, 2, sink=1), Stack.make()
    clean, noisy = clips(stream, 12)
    early, late = (
        rollout(stack, stream, stack.cache(stream), clean, noisy, first) for first in (0, 50_000)
    )
    close(late.clean, early.clean, atol=1e-4)
    close(late.noisy, early.noisy, atol=1e-4)


def test_positions_by_slots_are_absolute_ones_without_a_sink() -> None:
    stream, stack = ma.Stream(2, 3, 2), Stack.make()
    clean, noisy = clips(stream, 18)
    made = rollout(stack, stream, stack.cache(stream, positions="slots"), clean, noisy)
    want_clean, want_noisy = teacher_forward(stack, stream, clean, noisy)
    close(made.clean, want_clean, atol=1e-4)
    close(made.noisy, want_noisy, atol=1e-4)


def test_positions_by_slots_are_others_with_a_sink_once_the_window_rolls() -> None:
    stream, stack = ma.Stream(2, 3, 3, sink=3), Stack.make()
    clean, noisy = clips(stream, 18)
    how = {"positions": "slots_with_sink"}
    made = rollout(stack, stream, stack.cache(stream, **how), clean, noisy)
    want, _ = teacher_forward(stack, stream, clean, noisy)
    full = (stream.budget or 0) * 2
    close(made.clean[:, :full], want[:, :full], atol=1e-4)
    assert np.abs(made.clean[:, full:] - want[:, full:]).max() > 1e-2
