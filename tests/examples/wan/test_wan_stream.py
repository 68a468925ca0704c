"""Wan's blocks, made one by one with a cache, are those of one forward of the whole model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common.forcing import Forcing

import maxattn as ma
from tests.examples.wan.streamed import TOKENS, blocks, clips, empty, plain, small, text, times
from tests.pairwise import pairwise
from tests.streaming.test_equivalence import AXES, fits, frames_of, name
from tests.waiting import but


def stream_of(case: dict) -> ma.Stream:
    return ma.Stream(TOKENS, case["size"], case["window"], case["sink"], case["alone"])


def forced(stream: ma.Stream, clean: jax.Array, noisy: jax.Array) -> jax.Array:
    """Return the velocity of the noisy clip, teacher-forced in one forward."""
    t, forcing = times(*noisy.shape[1::-1]), Forcing(stream, clean)
    return jax.jit(plain())(noisy, t, text(noisy.shape[0]), forcing=forcing)


# tests/streaming/test_equivalence.py has every pair, of layers that compile sooner: here a window
# that rolls in a block with a sink.
ROLLED = {"window": 2, "sink": 3, "size": 3, "alone": True}


@pytest.mark.parametrize("case", but(pairwise(AXES, fits), [ROLLED]), ids=name)
def test_every_block_is_that_of_teacher_forcing(case: dict) -> None:
    stream = stream_of(case)
    clean, noisy = clips(frames_of(stream))
    want = forced(stream, clean, noisy)
    got, step = blocks(plain(), stream, clean, noisy, empty(stream, clean.shape[1]))
    np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max()))
    assert step._cache_size() <= 3


# test_wan_forcing_meshes.py has its gradient.
@pytest.mark.slow
@pytest.mark.parametrize("alone", but([False, True], [True]))
def test_forcing_on_a_mesh_deals_both_clips_to_all_devices(alone: bool) -> None:
    """Teacher and diffusion forcing over context and tensor are those of one device."""
    config = ma.AttentionConfig(
        ici_data_parallelism=1, ici_context_parallelism=2, ici_tensor_parallelism=2
    )
    spread = small(config.make_mesh(jax.devices()[:4]))
    stream = ma.Stream(TOKENS, 1 if alone else 3, 3, sink=1, first_frame_alone=alone)
    clean, noisy = clips(12)
    t, t_clean = times(12), jnp.full((1, 12), 20.0)
    for forcing in (Forcing(stream, clean, t_clean), Forcing(stream)):
        made = [
            jax.jit(lambda x, f, m=model: m(x, t, text(), forcing=f))(noisy, forcing)
            for model in (spread, plain())
        ]
        np.testing.assert_allclose(*made, atol=1e-5 * float(jnp.abs(made[1]).max()))


def test_modulations_of_frames_are_never_those_of_all_tokens_at_once() -> None:
    """[B, T, 6, D] would be the largest array of a block: six rows where one is used at a time."""
    stream = ma.Stream(TOKENS, 3, 2)
    clean, _ = clips(3)
    made = jax.make_jaxpr(lambda x, t, c: plain()(x, t, text(), cache=c))(
        clean, times(3), empty(stream, 3)
    )
    assert "f32[1,3,6,24]" in str(made) and "f32[1,6,6,24]" not in str(made)
