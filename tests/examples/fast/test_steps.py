"""What each step computes, decided from settings alone."""

from __future__ import annotations

import pytest
from fast.settings import (
    CacheSettings,
    FastSettings,
    GuidanceSettings,
    KernelSettings,
    SkipSettings,
)
from fast.steps import forwards, plan_steps
from fast.table import ranges, table

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from tests.golden_text import check_golden

LAYERS = 4


def planned(experts=(6,), guided=True, **fast):
    return plan_steps(FastSettings(**fast), experts, guided, LAYERS)


def written(found):
    """Write a letter for each step: X computes, . reuses, 0 predicts zero; small: once."""
    letters = {"compute": "X", "reuse": "."}
    return "".join(
        "0" if x.step.guidance == "zero" else letters[x.step.layers] + str(x.step.calls)
        for x in found
    )


def test_without_settings_every_step_computes_both():
    found = plan_steps(None, (3, 2), True, LAYERS)
    assert written(found) == "X2" * 5
    assert not any(x.step.keeps or x.weights for x in found)
    assert not list(table(found, LAYERS, True, {}))
    assert forwards(found, LAYERS, True) == (10, 10)


def test_a_schedule_is_what_is_written():
    found = planned(cache=CacheSettings(schedule="XX..X."))
    assert written(found) == "X2X2.2.2X2.2"
    assert [x.weights for x in found] == [(), (), (1.0,), (1.0,), (), (1.0,)]
    assert forwards(found, LAYERS, True) == (6, 12)


def test_order_one_is_the_line_through_the_last_two_computed_steps():
    found = planned(cache=CacheSettings(schedule="X.X..X", order=1))
    assert [x.weights for x in found] == [(), (1.0,), (), (1.5, -0.5), (2.0, -1.0), ()]


def test_layers_outside_of_the_span_are_computed():
    found = planned(cache=CacheSettings(schedule="X.....", layers=(1, 3)))
    assert forwards(found, LAYERS, True) == (2 + 5 * 2 * 0.5, 12)


def test_each_model_of_a_pipeline_computes_its_first_step():
    found = planned((3, 3), cache=CacheSettings(schedule="X.....", order=1))
    assert written(found) == "X2.2.2X2.2.2"
    gate = GuidanceSettings(stop=0.5, after="gate")
    assert [x.step.guidance for x in planned((4, 2), guidance=gate)] == [
        *["guided"] * 3, "gate", "guided", "gate",
    ]  # fmt: skip


def test_a_step_that_is_guided_again_computes():
    """The steps before it predicted once: nothing was kept of the prediction without the text."""
    found = planned(
        cache=CacheSettings(schedule="X....."), guidance=GuidanceSettings(start=0.5, stop=1.0)
    )
    assert written(found) == "X1.1.1X2.2.2"


def test_zero_steps_compute_nothing_and_keep_nothing():
    found = planned(cache=CacheSettings(schedule="X....."), guidance=GuidanceSettings(zero_steps=2))
    assert written(found) == "00X2.2.2.2"
    assert forwards(found, LAYERS, True) == (2, 12)


def test_a_gate_keeps_the_difference_of_each_guided_step():
    found = planned(guidance=GuidanceSettings(stop=0.5, after="gate"))
    assert [x.step.keeps_difference for x in found] == [True] * 3 + [False] * 3
    assert forwards(found, LAYERS, True) == (9, 12)


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        ({"schedule": "XX.."}, "it has a letter for each of the 6 steps, and has 4"),
        ({"schedule": "XX....", "layers": (2, 9)}, "the model has the layers 0 to 3"),
        ({"schedule": ".XXXXX"}, "the first step has nothing to reuse"),
        ({"schedule": "XXabXX"}, "it has a letter for each step, X (compute) or . (reuse)"),
        ({"layers": (3, 3)}, "the first layer that is reused, and the first one after them"),
    ],
)
def test_what_does_not_fit_is_refused(cache, says):
    with pytest.raises((ConfigError, ConfigErrors)) as error:
        planned(cache=CacheSettings(**cache))
    assert says in str(error.value)


def test_a_gate_guides_until_there_is_a_difference():
    found = planned((3, 3), guidance=GuidanceSettings(stop=0.1, after="gate", zero_steps=1))
    assert [x.step.guidance for x in found] == ["zero", "guided", "gate", "guided", "gate", "gate"]


def test_what_steps_compute_is_one_table():
    """Golden: a row for each kind of step, wherever it is in the run."""
    cache = CacheSettings(schedule="XXXX.X.X.X.X.X..X.XX", layers=(1, 4))
    skip = SkipSettings(layers=(1, 2), prediction="negative", start=0.1, stop=0.2)
    guidance = GuidanceSettings(stop=0.7, after="gate", zero_steps=1, skip=skip)
    kernels = (KernelSettings(steps=(0, 4), attention="dot_product"),)
    found = planned((20,), cache=cache, guidance=guidance, kernels=kernels)
    lines = table(found, LAYERS, True, {None: "flash", "dot_product": "dot_product"}, 3 << 28)
    check_golden("fast/table", "\n".join(lines))
    only = planned(kernels=kernels)
    check_golden("fast/table_of_kernels", "\n".join(table(only, LAYERS, True, {None: "flash"})))


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([1], "1"),
        ([1, 2, 3, 5], "1 to 3, 5"),
        ([2, 4, 6], "2, 4, 6"),
        ([2, 4, 6, 8, 9, 10], "2 to 8 by 2, 9 to 10"),
        ([1, 4, 7, 10, 20], "1 to 10 by 3, 20"),
        ([1, 2, 4, 5, 7, 8, 10, 11, 13, 14], "1 to 2, 4 to 5, ... 13 to 14"),
    ],
)
def test_step_numbers_are_few_words(numbers, said):
    assert ranges(numbers) == said


def test_steps_have_the_kernels_that_are_named():
    some = (KernelSettings(steps=(0, 2), attention="dot_product"),)
    assert [x.step.kernel for x in planned(kernels=some)] == ["dot_product"] * 2 + [None] * 4
    late = (KernelSettings(steps=(4, 9), attention="flash"),)
    with pytest.raises(ConfigError, match=r"kernels\[0\].steps.*\n.*the run has the steps 0 to 5"):
        planned(kernels=late)


@pytest.mark.parametrize(
    ("kernels", "says"),
    [
        ([{"steps": [3, 3], "attention": "flash"}], "the first step that has the kernel"),
        ([{"steps": [0, 3], "attention": "flash", "layers": [0, 2]}], "all its layers"),
        ([{"steps": [0, 3], "attention": "ring"}], "attention"),
        (
            [{"steps": [2, 4], "attention": "flash"}, {"steps": [0, 3], "attention": "cudnn"}],
            "steps [0, 3] have the kernel cudnn",
        ),
    ],
)
def test_kernels_that_contradict_are_refused(kernels, says):
    with pytest.raises(ConfigErrors) as error:
        FastSettings(kernels=kernels)
    assert says in str(error.value)


def test_skipped_layers_are_not_forwards():
    third = SkipSettings(layers=(1,), start=0.0, stop=0.5)
    found = planned(guidance=GuidanceSettings(skip=third))
    assert [x.step.calls for x in found] == [2, 3, 3, 2, 2, 2]
    assert forwards(found, LAYERS, True) == (12 + 2 * 0.75, 12)
    negative = SkipSettings(layers=(3, 1), prediction="negative", start=0.0, stop=0.5)
    found = planned(guidance=GuidanceSettings(skip=negative))
    assert forwards(found, LAYERS, True) == (11, 12)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"stop": 0.5}, "guidance.stop"),
        ({"zero_star": True}, "guidance.zero_star"),
        ({"rescale": 0.5}, "guidance.rescale"),
        ({"skip": {"layers": (1,), "prediction": "negative"}}, "guidance.skip.prediction"),
    ],
)
def test_a_run_without_guidance_takes_no_schedule_of_it(how, says):
    with pytest.raises(ConfigError, match=says):
        planned(guided=False, guidance=GuidanceSettings(**how))
    skip = SkipSettings(layers=(1,), stop=0.5)
    planned(guided=False, guidance=GuidanceSettings(zero_steps=1, skip=skip))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"zero_steps": 6}, "guidance.zero_steps: 6\n.*called in at least one of the 6 steps"),
        ({"skip": {"layers": (1,)}}, "start 0.01 to stop 0.2 none of the 6 steps skips them"),
    ],
)
def test_guidance_without_any_step_of_its_kind_is_refused(how, says):
    with pytest.raises(ConfigError, match=says):
        planned(guidance=GuidanceSettings(**how))


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"layers": (4,)}, "the model has layers 0 to 3, and at least one of them is computed"),
        ({"layers": (0, 1, 2, 3)}, "at least one of them is computed"),
        ({"layers": ()}, "layers"),
        ({"layers": (1,), "prediction": "negative", "scale": 2.0}, "it is a third prediction's"),
        ({"layers": (1,), "start": 0.5}, "layers are skipped from start to stop, and stop=0.2"),
    ],
)
def test_skipped_layers_that_do_not_fit_are_refused(how, says):
    with pytest.raises((ConfigError, ConfigErrors)) as error:
        planned(guidance=GuidanceSettings(skip=SkipSettings(**how)))
    assert says in str(error.value)


def test_a_gate_without_a_guided_step_is_refused():
    with pytest.raises(ConfigErrors, match="a gate reuses the difference of a guided step"):
        GuidanceSettings(start=0.0, stop=0.0, after="gate")
