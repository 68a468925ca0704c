"""Clips of several digits: digits leave and return, they cross, and prompts describe them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.digits import scenes, words
from maxattn_examples.digits.scenes import BOUNCING, CROSSING, LEAVING, Scene, Size
from maxattn_examples.digits.torus import Scans
from maxattn_examples.digits.words import SCENES, STEPS

from maxattn.errors import InputError

SIZE = Size(13, 48, 80, 16)
SCANS = Scans.of("train")
NUMBERS = jnp.arange(48)


@jax.jit
def draw(seed: Any, numbers: Any) -> Scene:
    return scenes.draw(seed, numbers, SCANS, SIZE)


def one_at_a_time(scene: Scene) -> np.ndarray:
    """Render each digit of each clip alone: [B, K, F, H, W, 3]."""
    alone = [scene._replace(there=scene.there & (jnp.arange(3) == k)) for k in range(3)]
    return np.stack([rendered(x) for x in alone], 1)


def rendered(scene: Scene) -> np.ndarray:
    return np.asarray(scenes.render(scene, scenes.scans_here(SCANS), SIZE))


def ink_and_centre(alone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ink = alone.max(-1)
    total = ink.sum((-1, -2)) + 1e-9
    rows, columns = ink.sum(-1) @ np.arange(48), ink.sum(-2) @ np.arange(80)
    return total, np.stack([rows, columns], -1) / total[..., None]


class Drawn(NamedTuple):
    """A scene, its numbers as numpy arrays, and what is seen of each of its digits alone."""

    scene: Scene
    there: np.ndarray
    path: np.ndarray
    way: np.ndarray
    alone: np.ndarray
    ink: np.ndarray
    centre: np.ndarray


@pytest.fixture(scope="module")
def drawn() -> Drawn:
    scene = draw(3, NUMBERS)
    alone = one_at_a_time(scene)
    numbers = map(np.asarray, (scene.there, scene.path, scene.way))
    return Drawn(scene, *numbers, alone, *ink_and_centre(alone))


def test_digits_that_leave_are_gone_in_the_middle_and_come_back(drawn: Drawn):
    chosen = drawn.there & (drawn.path == LEAVING)
    assert chosen.sum() > 25
    ink = drawn.ink[chosen] / drawn.ink[chosen][:, :1]
    assert (ink[:, 5:8] < 1e-6).all()  # gone for three frames
    assert (ink[:, [0, 12]] > 0.99).all()
    np.testing.assert_allclose(drawn.centre[chosen][:, 12], drawn.centre[chosen][:, 0], atol=1e-3)


def test_digits_that_bounce_or_cross_stay_in_the_picture(drawn: Drawn):
    chosen = drawn.there & (drawn.path != LEAVING)
    ink = drawn.ink[chosen]
    assert (ink > 0.9 * ink[:, :1]).all()
    turned = np.diff(drawn.centre[drawn.there & (drawn.path == BOUNCING)], axis=1)
    assert (np.sign(turned[:, 0]) != np.sign(turned[:, -1])).any(-1).mean() > 0.5


def test_digits_begin_in_the_direction_of_their_prompt(drawn: Drawn):
    moved = (drawn.centre[:, :, 2] - drawn.centre[:, :, 0]) * STEPS[drawn.way]
    assert (moved.sum(-1)[drawn.there] > 0).all()


def test_two_that_cross_meet_in_one_lane_and_the_first_hides_the_second(drawn: Drawn):
    chosen = drawn.path[:, 0] == CROSSING
    first, second = drawn.centre[chosen, 0], drawn.centre[chosen, 1]
    apart = np.linalg.norm(first - second, axis=-1)
    assert (apart.min(1) < 8).all() and (apart[:, [0, 12]] > 16).all()
    alone, scene = drawn.alone[chosen], rendered(drawn.scene)[chosen]
    covered = alone[:, 0].max(-1) == 1
    np.testing.assert_allclose(scene[covered], alone[:, 0][covered], atol=1e-6)


def test_colours_and_digits_are_those_of_the_prompt(drawn: Drawn):
    said = [SCENES.read(prompt) for prompt in drawn.scene.prompts()]
    colours = np.array(list(words.COLOURS.values()))
    labels = np.searchsorted(SCANS.first, np.asarray(drawn.scene.scan), side="right") - 1
    for clip, phrases in enumerate(said):
        assert len(phrases) == drawn.there[clip].sum() >= 2
        assert len({p[0] for p in phrases}) == len({p[1] for p in phrases}) == len(phrases)
        for k, (colour, digit, path, _) in enumerate(phrases):
            shown = drawn.alone[clip, k, 0]
            np.testing.assert_allclose(shown, shown.max(-1, keepdims=True) * colours[colour])
            assert digit == labels[clip, k] and path == drawn.path[clip, k]


def test_a_clip_depends_on_its_number_and_the_seed_alone(drawn: Drawn):
    again = rendered(draw(3, NUMBERS + 10))
    np.testing.assert_array_equal(again[:10], rendered(drawn.scene)[10:20])
    other = rendered(draw(4, NUMBERS + 10))
    assert (np.abs(other - again).max((1, 2, 3, 4)) > 0.5).all()


def test_what_the_model_learns_is_turned_back_into_colours(drawn: Drawn):
    clip = jnp.asarray(rendered(drawn.scene)[:2])
    learned = scenes.to_model(clip)
    np.testing.assert_allclose(scenes.of_model(learned), clip, atol=1e-6)
    assert float(scenes.of_model(learned + 9).max()) == 1 and float(learned.min()) == -1


def test_a_frame_equals_interpolation_in_numpy(drawn: Drawn):
    at = np.asarray(scenes.corners(drawn.scene, SIZE))
    scan = np.pad(SCANS.ink[np.asarray(drawn.scene.scan)[2, 0]].astype(np.float64), 1)
    places = [(np.arange(n) + 0.5 - at[2, 0, 4, a]) / 2 - 0.5 for a, n in ((0, 48), (1, 80))]
    nodes = np.arange(-1, 9)
    wide = np.stack([np.interp(places[1], nodes, line, 0, 0) for line in scan])
    full = np.stack([np.interp(places[0], nodes, column, 0, 0) for column in wide.T], 1)
    np.testing.assert_allclose(drawn.alone[2, 0, 4].max(-1), np.clip(1.3 * full, 0, 1), atol=1e-5)


def test_prompts_are_read_and_encoded_as_the_device_encodes_them(drawn: Drawn):
    prompts = drawn.scene.prompts()
    assert [SCENES.prompt_of(SCENES.read(prompt)) for prompt in prompts] == prompts
    states = SCENES.encode(prompts)
    np.testing.assert_array_equal(states, SCENES.states(drawn.scene.numbers))
    assert states.shape == (len(NUMBERS), SCENES.length, SCENES.width)
    assert not SCENES.encode([""]).any()
    assert len(np.unique(states.reshape(len(NUMBERS), -1), axis=0)) == len(set(prompts))


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ("a red three leaving", "a digit has 4 words"),
        ("a red tree leaving left", "'tree' is in the place of one of zero, one"),
        (" and ".join(["a red two leaving up"] * 4), "names at most 3 digits, and this names 4"),
    ],
)
def test_a_prompt_that_cannot_be_read_is_refused(prompt: str, said: str):
    with pytest.raises(InputError, match=said):
        SCENES.read(prompt)
