"""The section `sampling.fast`: which steps compute, and which take results from earlier ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Len

import maxattn as ma
from maxattn.config import ConfigErrors, Section
from maxattn.errors import ConfigError
from maxattn_examples.common.settings import Count, NotNegative, Whole

from .cache_settings import CacheSettings


class SkipSettings(Section):
    """Layers that one prediction skips, so that the guided one is led away from it."""

    layers: Annotated[tuple[Whole, ...], Len(1)]
    """Their numbers; of Flux the double blocks come first."""
    prediction: Literal["third", "negative"] = "third"
    """A third prediction, with the text; or the one with the negative prompt, as for Wan."""
    scale: NotNegative | None = None
    """How far a third prediction leads away; null is 2.8."""
    start: Annotated[float, Ge(0), Le(1)] = 0.01
    """A share of the steps: layers are skipped after the step that is there."""
    stop: Annotated[float, Ge(0), Le(1)] = 0.2
    """A share of the steps: from it on no layer is skipped."""

    @property
    def third_scale(self) -> float:
        """How far a third prediction leads away."""
        return 2.8 if self.scale is None else self.scale

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse a scale without a third prediction, and steps that are none."""
        if values["scale"] is not None and values["prediction"] == "negative":
            rule = "it is a third prediction's, and prediction is negative"
            yield ConfigError("scale", values["scale"], rule, "leave it out: guidance has a scale")
        if values["start"] >= values["stop"]:
            rule = f"layers are skipped from start to stop, and stop={values['stop']:g}"
            yield ConfigError("start", values["start"], rule, "set start below stop")


class GuidanceSettings(Section):
    """Which steps are guided, and how their two predictions are mixed."""

    start: Annotated[float, Ge(0), Le(1)] = 0.0
    """A share of the steps: those before it predict with the text alone."""
    stop: Annotated[float, Ge(0), Le(1)] = 1.0
    """A share of the steps: those from it on are not guided by two predictions."""
    after: Literal["text", "gate"] = "text"
    """From stop on: the prediction with the text alone, or the last difference added to it."""
    zero_star: bool = False
    """Fit the prediction without the text to the other before they are mixed (CFG-Zero*)."""
    zero_steps: Whole = 0
    """First steps whose prediction is zero, which computes no forward (CFG-Zero*)."""
    rescale: Annotated[float, Ge(0), Le(1)] = 0.0
    """The share of the standard deviation that the prediction with the text has."""
    skip: SkipSettings | None = None
    """Layers that one of the predictions skips."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse an interval without steps, from which a gate could take no difference either."""
        if values["start"] >= values["stop"] and values["after"] == "gate":
            rule = f"a gate reuses the difference of a guided step, and stop={values['stop']:g}"
            yield ConfigError("start", values["start"], rule, "set start below stop")
        elif values["start"] > values["stop"]:
            rule = f"steps from start to stop are guided, and stop={values['stop']:g}"
            yield ConfigError("start", values["start"], rule, "set start below stop")


class KernelSettings(Section):
    """The kernel of some steps: the same weights under another attention."""

    steps: tuple[Whole, Count]
    """The first step that has it, counted from 0, and the first one after them."""
    attention: str
    """The kernel of self-attention, as the config's `attention`."""
    layers: tuple[Whole, Count] | None = None
    """Not supported: a step's kernel is that of all its layers."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse what is no kernel, steps that are none, and some of the layers."""
        try:
            ma.AttentionConfig(attention_kernel=values["attention"])
        except ConfigErrors as error:
            found = error.problems[0]
            rule, remedy = found.rule, found.remedy
            if is_setting("attention", name := values["attention"]):
                rule = f"{rule.partition(';')[0]}; {name} is a strategy, which all steps share"
                remedy = f"name a kernel here, and write `attention: {name}` outside of sampling"
            yield ConfigError("attention", name, rule, remedy)
        if values["steps"][0] >= values["steps"][1]:
            rule = "they are the first step that has the kernel, and the first one after them"
            remedy = "write the smaller number first"
            yield ConfigError("steps", list(values["steps"]), rule, remedy)
        if values["layers"] is not None:
            rule = "a step's kernel is that of all its layers"
            yield ConfigError("layers", list(values["layers"]), rule, "leave it out")


def is_setting(key: str, value: str) -> bool:
    """Check whether a key of attention's settings takes a value."""
    given: dict[str, Any] = {key: value}
    try:
        ma.AttentionConfig(**given)
    except ConfigErrors:
        return False
    return True


class FastSettings(Section):
    """Fewer forwards in sampling; everything here is approximate."""

    preset: Literal["gentle", "balanced", "fast"] | None = None
    """Settings of fast/presets.yml for the model's family, which other keys replace."""
    cache: CacheSettings | None = None
    """Which steps reuse the work of earlier ones."""
    guidance: GuidanceSettings | None = None
    """Which steps are guided."""
    kernels: tuple[KernelSettings, ...] = ()
    """Which steps have a kernel of their own; the others have the config's."""
    measured: str | None = None
    """A report of examples/drift.py: sampling prints which row of it is this run's, if any."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse steps of two kernels."""
        ordered = sorted(values["kernels"], key=lambda x: x.steps)
        for one, other in pairwise(ordered):
            if other.steps[0] < one.steps[1]:
                rule = f"steps {list(one.steps)} have the kernel {one.attention}"
                remedy = "give each step one kernel"
                yield ConfigError("kernels", f"steps {list(other.steps)}", rule, remedy)
