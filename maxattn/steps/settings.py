"""The settings of steps, for a program's YAML file (`sampling.fast` in the examples)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Len, Lt

from maxattn.config import AttentionConfig, ConfigErrors, Section
from maxattn.errors import ConfigError

COMPUTE, REUSE, DECIDE = "X", ".", "?"
Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Ratio = Annotated[float, Gt(0)]


def _unordered(key: str, values: Mapping[str, Any]) -> Iterable[ConfigError]:
    """Yield the error of a range [first, end) that is empty."""
    if (span := values[key]) is not None and span[0] >= span[1]:
        rule = f"they are the first of the {key}, and the first one after them"
        yield ConfigError(key, list(span), rule, "write the smaller number first")


class _StepSection(Section):
    former: ClassVar[Mapping[str, str]] = {
        "kernels": "write attention: [{steps: [0, 10], overrides: [attention=cudnn]}]",
        "measured": "remove it; examples/compare.py measures the drift of these settings",
        "after": "remove it; from guidance.stop on steps predict with the text alone",
        "teacache": "set cache.shape or cache.magcache instead",
        "easycache": "set cache.first_block instead",
        "calibrated": "set threshold, and for magcache ratios to the curve's file",
    }


class ShapeSettings(_StepSection):
    """A schedule for any number of steps: the first steps compute, then letters repeat."""

    first: Share = 0.2
    """Share of the steps that compute at the start, rounded up."""
    then: str = ".X"
    """Letters that repeat after these: X computes, . reuses."""
    last: Share = 0.0
    """Share of the steps that compute at the end, rounded up."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse other letters."""
        if not values["then"] or set(values["then"]) - {COMPUTE, REUSE}:
            rule = f"its letters are {COMPUTE} (compute) and {REUSE} (reuse)"
            yield ConfigError("then", repr(values["then"]), rule, "write letters such as ..X")


class MagCacheSettings(_StepSection):
    """A schedule computed from a curve that was measured on these weights (MagCache)."""

    ratios: str | Annotated[tuple[Ratio | tuple[Ratio, Ratio], ...], Len(1)]
    """Of each step |what the layers add| over the same of the step before, or pairs of it with the
    text and without. A program may take the name of a file."""
    threshold: NotNegative = 0.12
    """Steps reuse while their summed error is below it; 0 computes all."""
    most: Count = 2
    """Most steps in a row that reuse."""
    retained: Share = 0.2
    """Share of the steps that compute at the start."""
    interpolate: bool = False
    """Whether a curve of another number of steps is read at its nearest steps."""


class FirstBlockSettings(_StepSection):
    """Each step runs its first layers, and reuses the rest if their sum changed little."""

    threshold: NotNegative = 0.05
    """Of the mean change of what the first layers add, over its mean; 0 computes all steps."""
    blocks: Count = 1
    """First layers, which every step runs."""
    first: Count = 1
    """Steps that compute at the start."""
    last: Whole = 0
    """Steps that compute at the end."""
    most: Count = 3
    """Most steps in a row that reuse."""


KINDS = ("schedule", "interval", "shape", "magcache", "first_block")


class CacheSettings(_StepSection):
    """Which steps reuse the layers' sums of an earlier step (approximate)."""

    schedule: str | None = None
    """A letter for each step: X computes, . reuses, ? decides in the run, by first_block."""
    interval: Count | None = None
    """Every so many steps compute, from the first on; for a UNet it is DeepCache's, usually 3."""
    shape: ShapeSettings | None = None
    """Shares of the steps, and letters that repeat."""
    magcache: MagCacheSettings | None = None
    """Computed from a curve of these weights."""
    first_block: FirstBlockSettings | None = None
    """Decided in each step by what its first layers add."""
    order: Literal[0, 1] = 0
    """0 adds it as it was; 1 extends the line through the last two computed steps."""
    layers: tuple[Whole, Count] | None = None
    """The first layer that is reused, and the first one after them; null: all layers."""

    @property
    def kind(self) -> str | None:
        """The key that gives the schedule; None if no key does."""
        return next((key for key in KINDS if getattr(self, key) is not None), None)

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse two schedules, other letters, and schedules that reuse before they compute."""
        schedule, decides = values["schedule"], values["first_block"] is not None
        given = [key for key in KINDS if values[key] is not None]
        for key in given[1:] if DECIDE not in (schedule or "") else ():
            rule = f"{given[0]} gives the schedule, and only one key may"
            yield ConfigError(key, "given", rule, f"remove {key} or {given[0]}")
        letters = COMPUTE + REUSE + (DECIDE if decides else "")
        if schedule is not None and (
            not schedule.startswith(COMPUTE) or set(schedule) - {*letters}
        ):
            rule = f"its letters are {COMPUTE} (compute), first, and {REUSE} (reuse)"
            rule += f", and {DECIDE} (decide) beside first_block"
            yield ConfigError("schedule", repr(schedule), rule, "write letters such as XX.X.")
        yield from _unordered("layers", values)
        if values["layers"] is not None and decides:
            rule = "first_block reuses all layers after its first ones"
            yield ConfigError("layers", list(values["layers"]), rule, "set first_block.blocks")


class SkipSettings(_StepSection):
    """Layers that one prediction skips, to guide samples away from that prediction."""

    layers: Annotated[tuple[Whole, ...], Len(1)]
    """Their numbers; of Flux the double blocks come first."""
    prediction: Literal["third", "negative"] = "third"
    """A third prediction, with the text; or the one with the negative prompt, as for Wan."""
    scale: NotNegative = 2.8
    """How far a third prediction leads away."""
    start: Fraction = 0.01
    """Share of the steps: layers are skipped after the step that is there."""
    stop: Fraction = 0.2
    """Share of the steps: from it on no layer is skipped."""


class GuidanceSettings(_StepSection):
    """Which steps are guided, and how their predictions are mixed."""

    start: Fraction = 0.0
    """Share of the steps: those before it predict with the text alone."""
    stop: Fraction = 1.0
    """Share of the steps: those from it on predict with the text alone."""
    zero_star: bool = False
    """Fit the prediction without the text to the other before they are mixed (CFG-Zero*)."""
    zero_steps: Whole = 0
    """First steps whose prediction is zero, which computes no forward (CFG-Zero*)."""
    rescale: Fraction = 0.0
    """Share of the standard deviation of the prediction with the text that the mix has."""
    skip: SkipSettings | None = None
    """Layers that one of the predictions skips."""


class AttentionSettings(_StepSection):
    """The attention of some steps: settings that replace those of the modules' own config."""

    steps: tuple[Whole, Count]
    """The first of these steps, counted from 0, and the first one after them."""
    overrides: Annotated[tuple[str, ...], Len(1)]
    """Settings of self-attention, such as attention=cudnn."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse empty ranges, and settings that no config takes."""
        yield from _unordered("steps", values)
        try:
            AttentionConfig.from_overrides(values["overrides"])
        except ConfigErrors as errors:
            for each in errors.problems:
                value = f"{each.setting}={each.value}"
                yield ConfigError("overrides", value, each.rule, each.remedy)


class StepSettings(_StepSection):
    """Settings that reduce the forwards of sampling; each is an approximation."""

    cache: CacheSettings | None = None
    """Which steps reuse the work of earlier ones."""
    guidance: GuidanceSettings | None = None
    """Which steps are guided."""
    attention: tuple[AttentionSettings, ...] = ()
    """Which steps have attention of their own; of two for one step, the later one counts."""
