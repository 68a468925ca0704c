"""What each step computes, decided from settings alone."""

from __future__ import annotations

import re

import numpy as np
import pytest
import yaml
from maxattn_examples.fast.curves import Facts
from maxattn_examples.fast.settings import (
    CacheSettings,
    FastSettings,
    GuidanceSettings,
    KernelSettings,
    SkipSettings,
)
from maxattn_examples.fast.steps import forwards, plan_steps
from maxattn_examples.fast.table import ranges, table

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


def test_order_one_is_the_line_through_the_last_two_computed_steps():
    for order, line in ((1, [(1.5, -0.5), (2.0, -1.0)]), (0, [(1.0,), (1.0,)])):
        found = planned(cache=CacheSettings(schedule="X.X..X", order=order))
        assert [x.weights for x in found] == [(), (1.0,), (), *line, ()]


def test_each_model_of_a_pipeline_computes_its_first_step():
    found = planned((4, 3), cache=CacheSettings(schedule="X.X....", order=1))
    assert written(found) == "X2.2X2.2X2.2.2" and found[-1].weights == (1.0,)
    gate = GuidanceSettings(stop=0.5, after="gate")
    assert [x.step.guidance for x in planned((4, 2), guidance=gate)] == [
        *["guided"] * 3, "gate", "guided", "gate",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("cache", "guidance", "letters", "computed"),
    [
        ({"schedule": "XX..X."}, {}, "X2X2.2.2X2.2", 6),
        ({"schedule": "X.....", "layers": (1, 3)}, {}, "X2.2.2.2.2.2", 2 + 5 * 2 * 0.5),
        # Before a step that is guided again nothing was kept of the prediction without the text.
        ({"schedule": "X....."}, {"start": 0.5}, "X1.1.1X2.2.2", 3),
        ({"schedule": "X....."}, {"zero_steps": 2}, "00X2.2.2.2", 2),
    ],
)
def test_a_schedule_is_what_is_written(cache, guidance, letters, computed):
    found = planned(cache=CacheSettings(**cache), guidance=GuidanceSettings(**guidance))
    assert written(found) == letters and forwards(found, LAYERS, True) == (computed, 12)


@pytest.mark.parametrize(
    ("steps", "cache", "says"),
    [
        (6, {"schedule": "XX.."}, "it has a letter for each of the 6 steps, and has 4"),
        (6, {"schedule": "XX....", "layers": (2, 9)}, "the model has the layers 0 to 3"),
        (6, {"schedule": ".XXXXX"}, "the first step has nothing to reuse"),
        (6, {"schedule": "XXabXX"}, "it has a letter for each step, X (compute) or . (reuse)"),
        (6, {"layers": (3, 3)}, "the first layer that is reused, and the first one after them"),
        (6, {"order": 1}, "steps that reuse what layers added, and no key says which these are"),
        (6, {"schedule": "X.....", "order": 1}, "no step that reuses has two before it"),
        (6, {"interval": 2}, "interval gains next to nothing in fewer than 8 steps"),
        (8, {"interval": 2, "schedule": "X."}, "schedule says which steps compute, and one key"),
        (8, {"magcache": {"ratios": "none.yml"}}, "it names the YAML file of a curve"),
        (8, {"first_block": {"blocks": 4}}, "some layers come after the first ones"),
        (8, {"first_block": {}, "layers": (0, 2)}, "first_block reuses the rest"),
        (8, {"easycache": {}, "order": 1}, "easycache reuses what the last computed step had"),
        (8, {"easycache": {}, "first_block": {}}, "first_block says which steps compute"),
        (8, {"shape": {"then": "..?"}}, "its letters are X"),
        (8, {"interval": 1}, "interval: 1\n  rule    with it no step of 8 reuses anything\n"),
    ],
)
def test_what_does_not_fit_is_refused(steps, cache, says):
    with pytest.raises((ConfigError, ConfigErrors)) as error:
        planned((steps,), cache=CacheSettings(**cache))
    assert says in str(error.value)


ENDS = [
    ({"easycache": {}}, (11,), "first 10, last 1"),
    ({"easycache": {"threshold": 1.0}}, (4, 6), "the transformers have 4 and 6"),
    ({"first_block": {"first": 4, "last": 6}}, (9,), "the run has 9"),
    ({"shape": {"first": 0.5, "last": 0.6}}, (0, 9), "first 5, last 6"),
    ({"magcache": {"ratios": (1.0,) * 9, "retained": 0.99}}, (9,), "first 9, last 0"),
    ({"teacache": {"polynomial": (0.0, 0.0), "input": "modulation"}}, (5, 4), "first 5, last 0"),
]


@pytest.mark.parametrize(("cache", "experts", "says"), ENDS)
def test_a_cache_whose_ends_are_all_steps_is_refused(cache, experts, says):
    """The remedy, followed, leaves steps that may reuse; one of two transformers is enough."""
    facts = Facts(states=lambda _: [np.ones((n, 1)) for n in experts])
    with pytest.raises(ConfigError, match=says) as error:
        plan_steps(FastSettings(cache=cache), experts, True, LAYERS, facts)
    ((kind, own),) = cache.items()
    lower = re.findall(r"cache\.\w+\.(\w+)=(\S+?),? ", error.value.remedy)
    less = {kind: own | {key: yaml.safe_load(value) for key, value in lower}}
    found = plan_steps(FastSettings(cache=less), experts, True, LAYERS, facts)
    assert {x.letter for x in found} & {".", "?"}
    if "threshold" in own:
        off = {kind: own | {"threshold": 0.0}}
        assert written(planned(experts, cache=CacheSettings(**off))) == "X2" * sum(experts)


def test_a_cache_none_of_whose_steps_is_left_is_refused():
    """They are the first of a transformer or of a prediction, or predict zeros."""
    never = CacheSettings(schedule="XXX.XX")
    for experts, how in (((3, 3), {}), ((6,), {"start": 0.5}), ((6,), {"zero_steps": 4})):
        with pytest.raises(ConfigError, match=r"schedule: XXX.XX\n.*\n.*fast.cache=null"):
            planned(experts, cache=never, guidance=GuidanceSettings(**how))


def test_a_gate_guides_until_there_is_a_difference():
    found = planned(guidance=GuidanceSettings(stop=0.5, after="gate"))
    assert [x.step.keeps_difference for x in found] == [True] * 3 + [False] * 3
    assert forwards(found, LAYERS, True) == (9, 12)
    found = planned((3, 3), guidance=GuidanceSettings(stop=0.1, after="gate", zero_steps=1))
    assert [x.step.guidance for x in found] == ["zero", "guided", "gate", "guided", "gate", "gate"]
    last = planned((3,), guidance=GuidanceSettings(stop=0.1, after="gate", zero_steps=2))
    assert last[-1].step.guidance == "guided"


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
    names = {None: "flash", "dot_product": "dot_product"}
    *_, row, last = table(planned((4,), kernels=kernels), LAYERS, True, names)
    assert row.split() == ["1", "to", "4", "computed", "two", "dot_product", "8"]
    assert last == "approximate: the same forwards, by other kernels"
    assert not [*table(planned((4,), kernels=kernels), LAYERS, True, {None: "dot_product"})]
    third = GuidanceSettings(stop=0.54, skip=SkipSettings(layers=(0, 1), start=0.0, stop=1.0))
    *_, last = table(planned((13,), guidance=third), LAYERS, True, {None: "flash"})
    assert last == "approximate: 26 of 26 forwards are computed, 100%"


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
    with pytest.raises(ConfigErrors, match="these steps compute no layer"):
        planned(kernels=some, guidance=GuidanceSettings(zero_steps=2))


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
        FastSettings(kernels=kernels, cache={"schedule": ".X"})
    assert says in str(error.value)


def test_skipped_layers_are_not_forwards():
    third = SkipSettings(layers=(1,), start=0.0, stop=0.5)
    assert planned(guided=False, guidance=GuidanceSettings(zero_steps=1, skip=third))
    found = planned(guidance=GuidanceSettings(skip=third))
    assert [x.step.calls for x in found] == [2, 3, 3, 2, 2, 2]
    assert forwards(found, LAYERS, True) == (12 + 2 * 0.75, 12)
    negative = SkipSettings(layers=(3, 1), prediction="negative", start=0.0, stop=0.5)
    found = planned(guidance=GuidanceSettings(skip=negative))
    assert forwards(found, LAYERS, True) == (11, 12)


NEGATIVE, LATE = {"prediction": "negative"}, {"start": 0.5, "stop": 0.9}


@pytest.mark.parametrize(
    ("guided", "how", "says"),
    [
        (False, {"stop": 0.5, "zero_star": True}, "guidance.stop"),
        (False, {"stop": 0.5, "zero_star": True}, "guidance.zero_star"),
        (False, {"after": "gate"}, "gate\n  rule    it is about two predictions, and a run"),
        (False, {"rescale": 0.5}, "guidance.rescale"),
        (False, {"skip": {"layers": (1,), **NEGATIVE}}, "guidance.skip.prediction"),
        (True, {"zero_steps": 6}, "zero_steps: 6\n  rule    the model is called in at least one"),
        (True, {"skip": {"layers": (1,)}}, "start 0.01 to stop 0.2 none of the 6 steps skips them"),
        (True, {"skip": {"layers": (4,)}}, "the model has layers 0 to 3, and at least one of"),
        (True, {"skip": {"layers": (0, 1, 2, 3)}}, "at least one of them is computed"),
        (True, {"skip": {"layers": ()}}, "layers"),
        (True, {"skip": {"layers": (1,), **NEGATIVE, "scale": 2.0}}, "it is a third prediction's"),
        (True, {"skip": {"layers": (1,), "start": 0.5}}, "from start to stop, and stop=0.2"),
        (True, {"stop": 0.4, "skip": {"layers": (1,), **NEGATIVE, **LATE}}, "none is guided"),
        (True, {"start": 1.0, "zero_star": True, "rescale": 0.5}, "guidance.rescale: 0.5"),
        (True, {"after": "gate"}, "in the steps from stop on, and stop=1 leaves none"),
        (True, {"stop": 0.0, "after": "gate"}, "a gate reuses the difference of a guided step"),
    ],
)
def test_guidance_that_does_not_fit_is_refused(guided, how, says):
    with pytest.raises((ConfigError, ConfigErrors)) as error:
        planned(guided=guided, guidance=GuidanceSettings(**how))
    assert says in str(error.value)
