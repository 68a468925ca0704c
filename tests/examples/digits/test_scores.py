"""Scores detect faults that are planted in real clips, each fault by its own score."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.compare.report import distances, frechet, paired
from maxattn_examples.digits import scenes
from maxattn_examples.digits.judge import BETTER, Judge, flicker
from maxattn_examples.digits.scenes import BOUNCING, LEAVING, Scene, Size
from maxattn_examples.digits.torus import Scans

Scores = dict[str, np.ndarray]
SIZE = Size(13, 24, 40, 8)
SCANS = Scans.of("test")
JUDGE = Judge(SIZE)


@jax.jit
def draw(seed: Any) -> Scene:
    return scenes.draw(seed, jnp.arange(64), SCANS, SIZE)


def rendered(scene: Scene) -> jax.Array:
    return scenes.render(scene, scenes.scans_here(SCANS), SIZE)


@pytest.fixture(scope="module")
def scene() -> Scene:
    return draw(0)


@pytest.fixture(scope="module")
def clips(scene: Scene) -> jax.Array:
    return rendered(scene)


@pytest.fixture(scope="module")
def real(clips: jax.Array, scene: Scene) -> Scores:
    """The scores of real clips."""
    return JUDGE.score(clips, scene).scores


def other_digits(scene: Scene) -> Scene:
    """Replace the first hidden digit of every clip by another digit."""
    digits = np.asarray(scene.digit)
    new = np.array([next(d for d in range(10) if d not in row) for row in digits])
    hidden = np.asarray(scene.there & (scene.path != BOUNCING))
    chosen = np.arange(3) == hidden.argmax(-1)[:, None]
    scan = np.where(chosen, SCANS.first[new][:, None], np.asarray(scene.scan))
    return scene._replace(scan=jnp.asarray(scan))


@pytest.mark.slow
def test_real_clips_score_well(real: Scores):
    assert JUDGE.accuracy > 0.95
    for name, least in {"digit": 0.9, "identity": 0.9, "kept": 0.95, "path": 0.93}.items():
        assert real[name].mean() > least, name
    assert real["margin"].mean() > 2 and real["stray"].mean() < 0.02
    assert set(real) == {*BETTER, "flicker"} and all(x.shape == (64,) for x in real.values())


def test_a_digit_that_comes_back_as_another_loses_its_identity(
    scene: Scene, clips: jax.Array, real: Scores
):
    late = jnp.arange(13)[:, None, None, None] > 6
    swapped = jnp.where(late, rendered(other_digits(scene)), clips)
    found = JUDGE.score(swapped, scene).scores
    lost = paired(found["identity"], real["identity"])
    assert lost.mean < -0.3 and lost.better <= 2 and lost.p < 1e-6
    assert paired(found["kept"], real["kept"]).p < 1e-6
    assert abs(paired(found["path"], real["path"]).mean) < 0.05


def test_other_digits_from_the_first_frame_keep_their_identity(scene: Scene, real: Scores):
    found = JUDGE.score(rendered(other_digits(scene)), scene).scores
    wrong = paired(found["digit"], real["digit"])
    assert wrong.mean < -0.25 and wrong.p < 1e-6
    assert paired(found["likelihood"], real["likelihood"]).mean < -0.5
    assert abs(paired(found["identity"], real["identity"]).mean) < 0.05


def test_a_frozen_video_moves_nowhere_and_does_not_flicker(
    scene: Scene, clips: jax.Array, real: Scores
):
    frozen = jnp.broadcast_to(clips[:, :1], clips.shape)
    found = JUDGE.score(frozen, scene).scores
    assert (found["flicker"] == 0).all() and found["path"].mean() < 0.1
    assert found["digit"].mean() > 0.9 and real["flicker"].min() > 0


def test_digits_that_never_come_back_are_found(scene: Scene, clips: jax.Array, real: Scores):
    leaves = scene.path == LEAVING
    late = jnp.arange(13)[:, None, None, None] > 6
    gone = jnp.where(late, rendered(scene._replace(there=scene.there & ~leaves)), clips)
    found = JUDGE.score(gone, scene).scores
    clip = np.asarray((scene.there & leaves).any(-1))
    assert (found["identity"] < real["identity"])[clip].mean() > 0.9
    assert (found["path"] < real["path"])[clip].mean() > 0.9


def test_noise_shows_no_digits_and_is_far_from_real_clips(scene: Scene, clips: jax.Array):
    noise = jax.random.uniform(jax.random.key(0), clips.shape)
    scored, whole = JUDGE.score(noise, scene), JUDGE.score(clips, scene)
    found = scored.scores
    assert found["digit"].mean() < 0.4 and found["stray"].mean() > 0.3
    assert found["kept"].mean() < 0.6 and found["identity"].mean() < 0.6
    other = draw(1)
    near = JUDGE.score(rendered(other), other).features
    far = frechet(scored.features, whole.features)
    assert far > 5 * frechet(near, whole.features)


def test_an_empty_video_shows_no_digit(scene: Scene, clips: jax.Array):
    found = JUDGE.score(jnp.zeros_like(clips), scene).scores
    for name in ("digit", "identity", "kept", "path", "stray", "flicker"):
        assert not np.nan_to_num(found[name], nan=1).any(), name
    np.testing.assert_allclose(found["likelihood"], np.log(0.1))


def test_colours_that_the_prompt_does_not_name_are_stray(scene: Scene, real: Scores):
    other = scene._replace(colour=(scene.colour + 1) % 6)
    found = JUDGE.score(rendered(other), scene).scores
    assert found["stray"].mean() > real["stray"].mean() + 0.3


def test_flicker_and_drift_are_what_they_say():
    rng = np.random.default_rng(0)
    x, apart = rng.normal(size=(3, 5, 4, 4, 3)), rng.normal(size=(3, 5, 4, 4, 3))
    shaken = np.zeros_like(x)
    shaken[:, ::2] = 1
    np.testing.assert_allclose(flicker(shaken), 1)
    wanted = [np.linalg.norm(apart[i]) / np.linalg.norm(x[i]) for i in range(3)]
    np.testing.assert_allclose(distances(x + apart, x), wanted, rtol=1e-12)


def test_frechet_distances_equal_the_closed_form():
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    normal = rng.normal(size=(5000, 4))
    normal = (normal - normal.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(normal.T))).T
    wide, narrow = np.array([1.0, 2, 3, 4]), np.array([2.0, 1, 1, 5])
    a, b = (normal * s @ basis.T for s in (wide, narrow))  # covariances of the same axes
    moved = b + np.array([1.0, 0, 2, 0])
    assert frechet(a, moved) == pytest.approx(((wide - narrow) ** 2).sum() + 5, rel=1e-6)
    assert frechet(a, a) == pytest.approx(0, abs=1e-6)
    assert frechet(a[:1], a) == np.inf


def test_pairs_of_clips_are_tested():
    rng = np.random.default_rng(0)
    base = rng.normal(size=64)
    same, up = paired(base, base), paired(base + 0.1 + 0.05 * rng.normal(size=64), base)
    assert (same.p, same.mean, same.better, same.worse) == (1.0, 0.0, 0, 0)
    assert up.p < 1e-6 and up.better > 55 and up.mean == pytest.approx(0.1, abs=0.03)
    down = paired(base + 0.1, base, better=-1)
    assert (down.better, down.worse) == (0, 64) and down.mean == pytest.approx(0.1)
    # By hand: the ranks 1, 2, 3, all of one sign, of 2^3 signs: 2 / 8.
    assert paired(np.array([1.0, 2, 3]), np.zeros(3)).p == pytest.approx(0.25)
