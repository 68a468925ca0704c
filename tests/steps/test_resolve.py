"""Resolving settings: what each step computes."""

from __future__ import annotations

import jax
import pytest

import maxattn as ma
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.steps import StepSettings
from maxattn.steps.value import ranges
from tests.golden_text import check_golden

LAYERS = 4


def resolved(counts=6, guided=True, **settings):
    return ma.steps.resolve(StepSettings(**settings), counts, LAYERS, guided)


def test_order_one_is_the_line_through_the_last_two_computed_steps():
    for order, line in ((1, [(1.5, -0.5), (2.0, -1.0)]), (0, [(1.0,), (1.0,)])):
        steps = resolved(cache={"schedule": "X.X..X", "order": order})
        assert [step.weights for step in steps] == [(), (1.0,), (), *line, ()]


SCHEDULES = [
    ({"interval": 3}, 8, "X..X..X."),
    ({"shape": {"first": 0.2, "then": "..X", "last": 0.1}}, 10, "XX..X..X.X"),
    ({"magcache": {"ratios": [1.0] + [0.95] * 9, "threshold": 0.2, "retained": 0.1}}, 10,
     "X..X..X..X"),
    ({"magcache": {"ratios": [1.0] * 5, "interpolate": True, "most": 3}}, 10, "XX...X...X"),
    ({"first_block": {"first": 2, "last": 1}}, 8, "XX?????X"),
    ({"first_block": {"threshold": 0.0}}, 8, "XXXXXXXX"),
    ({"schedule": "XX.X....", "layers": [1, 3]}, 8, "XX.X...."),
]  # fmt: skip


@pytest.mark.parametrize(("cache", "n", "letters"), SCHEDULES)
def test_a_cache_gives_a_letter_for_each_step(cache, n, letters):
    assert resolved(n, cache=cache).letters == letters


def test_each_model_and_each_new_prediction_computes_its_first_step():
    assert resolved((4, 4), cache={"schedule": "X.X....."}).letters == "X.X.X..."
    late = resolved(8, cache={"schedule": "X......."}, guidance={"start": 0.5})
    assert late.letters == "X...X..." and late.forwards == 1 + 2
    skip = {"layers": [1], "prediction": "negative", "start": 0.1, "stop": 0.5}
    skips = resolved(8, cache={"schedule": "X......."}, guidance={"skip": skip})
    assert skips.letters == "XX..X...", "the negative prediction skips, and then no more"
    zeros = resolved(8, cache={"schedule": "X......."}, guidance={"zero_steps": 2})
    assert zeros.letters == "XXX....." and zeros.forwards == 2


def test_a_second_model_has_settings_of_its_own():
    own = [StepSettings(cache={"interval": 2}), StepSettings(cache={"interval": 4})]
    steps = ma.steps.resolve(own, (4, 4), LAYERS, guided=(True, False))
    assert steps.letters == "X.X.X..." and steps.forwards == 4 + 1 and steps.whole == 12
    wrong = [None, StepSettings(cache={"interval": 2, "layers": [0, 9]})]
    for counts, says in (((4, 4), "sampling.fast_2.cache.layers"), (8, "for each of 1 models")):
        with pytest.raises(ConfigError, match=says):
            ma.steps.resolve(wrong, counts, LAYERS, setting="sampling.fast")


def test_a_value_is_hashable_and_a_step_is_a_pytree():
    steps = resolved(8, cache={"interval": 2, "order": 1})
    assert hash(steps) == hash(resolved(8, cache={"interval": 2, "order": 1}))
    assert steps != resolved(8, cache={"interval": 2})
    assert jax.tree.map(lambda x: x, steps[5]) == steps[5]
    kinds = {jax.tree.structure(step) for step in steps}
    assert len(kinds) == 3, "X, the first '.', and '.' of order 1"


REFUSED = {
    "minus": ({"counts": -1}, "steps: -1"),
    "half": ({"counts": 2.5}, "a whole number from 0"),
    "text": ({"counts": "20"}, "steps: '20'"),
    "letters": ({"cache": {"schedule": "XX.."}}, "a letter for each of the 6 steps, and has 4"),
    "range": ({"cache": {"interval": 2, "layers": [2, 9]}}, "the model has the layers 0 to 3"),
    "empty": ({"cache": {"interval": 2, "layers": [3, 3]}}, "the first one after them"),
    "begins": ({"cache": {"schedule": ".XXXXX"}}, "X (compute), first"),
    "decides": ({"cache": {"schedule": "X????X"}}, "? (decide) beside first_block"),
    "two": ({"cache": {"schedule": "X.X.X.", "interval": 2}}, "only one key may"),
    "blocks": ({"cache": {"first_block": {"blocks": 4}}}, "its first layers decide about the rest"),
    "curve": ({"cache": {"magcache": {"ratios": [1.0]}}}, "it is a curve of 1 steps"),
    "number": ({"cache": {"magcache": {"ratios": [1.0, -1.0]}}}, "ratios"),
    "zeros": ({"guidance": {"zero_steps": 6}}, "called in at least one of the 6 steps"),
    "layers": ({"guidance": {"skip": {"layers": [4]}}}, "the model has layers 0 to 3"),
    "name": ({"attention": [{"steps": [0, 2], "overrides": ["attention=flsh"]}]}, "flsh"),
    "guided": ({"guided": [True, False]}, "for each of 1 models"),
    "file": ({"cache": {"magcache": {"ratios": "curve.yml"}}}, "names a file"),
    # Keys of earlier versions.
    "teacache": ({"cache": {"teacache": {}}}, "set cache.shape or cache.magcache instead"),
    "after": ({"guidance": {"after": "reuse"}}, "from guidance.stop on"),
    "kernels": ({"kernels": []}, "write attention: [{steps:"),
    "end": ({"attention": [{"steps": [0, 9], "overrides": ["attention=flash"]}]}, "0 to 5"),
    # What no step has.
    "order": ({"cache": {"order": 1}}, "it changes no step of the run"),
    "line": ({"cache": {"schedule": "X.....", "order": 1}}, "steps.cache.order: 1"),
    "interval": ({"cache": {"interval": 1}}, "steps.cache.interval: 1"),
    "ends": ({"cache": {"shape": {"first": 0.5, "last": 0.6}}}, "steps.cache.shape"),
    "skips": ({"guidance": {"skip": {"layers": [1], "stop": 0.1}}}, "steps.guidance.skip"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_runs(name):
    settings, says = REFUSED[name]
    with pytest.raises((ConfigError, ConfigErrors)) as error:
        resolved(**settings)
    assert says in str(error.value)


def test_settings_that_are_no_settings_are_refused():
    with pytest.raises(ConfigError, match="StepSettings"):
        ma.steps.resolve({"cache": {"interval": 2}}, 4, LAYERS)


@pytest.mark.parametrize("key", ["zero_star", "rescale", "start", "stop"])
def test_settings_of_two_predictions_need_two(key):
    with pytest.raises(ConfigError, match=rf"guidance.{key}.*\n.*6 steps without guidance"):
        resolved(guided=False, guidance={key: True if key == "zero_star" else 0.5})


def test_steps_print_as_one_table():
    mixed = resolved(
        20,
        cache={"schedule": "XX.XX.X.X.X.X.XX..XX", "layers": [1, 4], "order": 1},
        guidance={"stop": 0.8, "zero_steps": 1,
                  "skip": {"layers": [1, 2], "prediction": "negative"}},
        attention=[{"steps": [0, 4], "overrides": ["attention=dot_product"]}],
    )  # fmt: skip
    decides = resolved(8, cache={"first_block": {"first": 2, "last": 1}})
    tables = {
        "table": mixed.table(0.44, 3 * 2**28),
        "decides": str(decides),
        "as_usual": str(resolved(4)),
    }
    for name, text in tables.items():
        check_golden(f"steps/{name}", text)


def test_numbers_of_steps_are_ranges():
    written = {
        (0, 1, 2): "1 to 3",
        (0, 2, 4): "1 to 5 by 2",
        (0, 5): "1, 6",
        (0, 1, 2, 4, 6, 8, 9): "1 to 3, 5 to 9 by 2, 10",
        (0, 1, 3, 4, 6, 7, 9, 10, 12, 13): "1 to 2, 4 to 5, ..., 13 to 14",
    }
    assert {numbers: ranges(numbers) for numbers in written} == written
