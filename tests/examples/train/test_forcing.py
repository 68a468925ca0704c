"""Training by forcing: times of blocks, clips and their noise, and refusals."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.train import flow, forcing
from maxattn_examples.train.forcing import Noise

import maxattn as ma
from maxattn.errors import InputError

STREAM = ma.Stream(4, 3, window=2)
ALONE = ma.Stream(4, 3, first_frame_alone=True)
CLEAN = np.random.default_rng(0).normal(size=(512, 6, 2, 2, 1)).astype("f")


def noised(noise: Noise) -> dict[str, np.ndarray]:
    """Make the clips' noisy inputs in one program, which compiles sooner than its operations."""
    found = jax.jit(lambda x, key: forcing.noised(x, key, noise))(CLEAN, jax.random.key(0))
    return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize(("stream", "frames"), [(STREAM, 12), (ALONE, 10), (ma.Stream(4), 5)])
def test_frames_of_a_block_have_one_time_and_blocks_have_their_own(stream: ma.Stream, frames: int):
    t = np.asarray(forcing.block_times(jax.random.key(0), 4096, frames, Noise(stream, 3.0)))
    each = []
    for start, stop in stream.blocks(frames):
        assert (t[:, start:stop] == t[:, start : start + 1]).all()
        each.append(t[:, start])
    apart = np.corrcoef(each) - np.eye(len(each))
    assert np.abs(apart).max() < 0.06


def test_times_are_drawn_as_those_of_clips():
    t = forcing.block_times(jax.random.key(0), 8192, 6, Noise(STREAM, 3.0))
    alone = flow.times(jax.random.key(1), 16384, 3.0)
    at = jnp.linspace(0.05, 0.95, 19)
    np.testing.assert_allclose(jnp.quantile(t, at), jnp.quantile(alone, at), atol=0.02)
    uniform = Noise(STREAM, 1.0, more={"sampling": "uniform"})
    t = forcing.block_times(jax.random.key(0), 8192, 6, uniform)
    np.testing.assert_allclose(jnp.quantile(t, at), at, atol=0.02)


def test_noisy_clips_are_mixed_at_their_times():
    found = noised(Noise(STREAM, 3.0, None))
    assert set(found) == {"mixed", "times", "velocity"}
    t, noise = found["times"][..., None, None, None], found["velocity"] + CLEAN
    np.testing.assert_allclose(found["mixed"], (1 - t) * CLEAN + t * noise, atol=1e-6)
    assert abs(float(noise.mean())) < 0.02
    assert float(noise.std()) == pytest.approx(1.0, abs=0.02)


def test_context_has_little_noise_of_its_own_and_its_true_time():
    found = noised(Noise(STREAM, 3.0, 0.1))
    at = found["context_times"]
    assert (at == at[:, :1]).all()
    np.testing.assert_allclose(np.quantile(at, [0.1, 0.5, 0.9]), [0.01, 0.05, 0.09], atol=0.01)
    t = at[..., None, None, None]
    own = ((found["context"] - (1 - t) * CLEAN) / t)[at[:, 0] > 0.02]
    assert float(own.std()) == pytest.approx(1.0, abs=0.03)
    other = (found["velocity"] + CLEAN)[at[:, 0] > 0.02]
    assert abs(np.corrcoef(own.ravel(), other.ravel())[0, 1]) < 0.03


def test_a_context_without_noise_is_the_clip_at_time_0():
    found = noised(Noise(STREAM, 3.0, 0.0))
    np.testing.assert_array_equal(found["context"], CLEAN)
    assert not found["context_times"].any()


def test_some_contexts_are_noise_alone_and_are_told_so():
    found = noised(Noise(STREAM, 3.0, 0.1, dropped=0.25))
    dropped = found["context_times"][:, 0] == 1.0
    assert dropped.mean() == pytest.approx(0.25, abs=0.06)
    assert (found["context_times"][~dropped] < 0.1).all()
    lost = np.corrcoef(found["context"][dropped].ravel(), CLEAN[dropped].ravel())
    assert abs(lost[0, 1]) < 0.05


def test_a_model_is_told_times_in_its_own_unit():
    found = noised(Noise(STREAM, 3.0, 0.1))
    seen = forcing.seen(found, STREAM, 1000.0)
    np.testing.assert_allclose(seen.t_clean, 1000 * found["context_times"], rtol=1e-6)
    assert seen.stream == STREAM
    bare = {name: found[name] for name in ("mixed", "times", "velocity")}
    assert forcing.seen(bare, STREAM).clean is None


def test_a_clip_of_a_part_of_a_block_is_refused():
    with pytest.raises(InputError, match="whole blocks of 3"):
        forcing.noised(CLEAN[:, :5], jax.random.key(0), Noise(STREAM, 3.0))
