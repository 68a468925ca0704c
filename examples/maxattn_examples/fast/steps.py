"""What each step of a run computes: decided before the run, from settings alone."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError

from .cache_settings import COMPUTE, DECIDE, REUSE, Dynamic, EasyCacheSettings, FirstBlockSettings
from .calibrated import check_calibrated, filled
from .curves import Facts
from .idle import check_idle
from .schedules import FEW, check_one_layer, check_reuse, letters_of
from .settings import FastSettings, GuidanceSettings, KernelSettings

Guidance = Literal["none", "guided", "gate", "zero"]
# Predictions in which layers are skipped: a third one, or the one without the text.
SKIPPING = THIRD, WITHOUT = "third", "without_skipping"
NONE = "-"  # of a step without a prediction
# What decided, where calls decide apart.
CALLS = {"with": " with the text", THIRD: " that skip layers"}
CALLS |= dict.fromkeys(("without", WITHOUT), " without the text")


class Step(NamedTuple):
    """Say what a step computes; steps of one kind share a compiled program.

    Args:
        layers: "compute", or "reuse" what the layers added in an earlier step, or "decide" which.
        guidance: "none": a prediction with the text; "guided": one without it too; "gate": with the
            difference of an earlier step; "zero": no prediction, but zeros.
        keeps: whether what the layers add is kept for later steps.
        span: the first layer that is reused, and the first one after them; None for all.
        keeps_difference: whether the difference of the two predictions is kept for a gate.
        skip: numbers of layers that one prediction skips.
        skip_in: that prediction.
        decides: how a step decides; of one that computes, what it keeps for those that do.
        kernel: of self-attention; None for the config's.
    """

    layers: Literal["compute", "reuse", "decide"] = "compute"
    guidance: Guidance = "none"
    keeps: bool = False
    span: tuple[int, int] | None = None
    keeps_difference: bool = False
    skip: tuple[int, ...] = ()
    skip_in: Literal["third", "negative"] = "third"
    decides: Dynamic | None = None
    kernel: str | None = None

    @property
    def predictions(self) -> tuple[str, ...]:
        """The names of the predictions that the step combines, in their order."""
        if self.guidance == "zero":
            return ()
        without = WITHOUT if self.skip and self.skip_in == "negative" else "without"
        third = (THIRD,) if self.skip and self.skip_in == "third" else ()
        return (*((without,) if self.guidance == "guided" else ()), "with", *third)

    @property
    def skips(self) -> bool:
        """Whether one of its predictions skips layers."""
        return bool(set(SKIPPING) & set(self.predictions))

    @property
    def calls(self) -> int:
        """Predictions that the step combines."""
        return len(self.predictions)

    def forwards(self, layers: int, reused: Container[str] = ()) -> float:
        """Count the forwards of a model with so many layers that the step computes.

        Args:
            layers: of the model.
            reused: predictions that the step decided not to compute; without them: at most.
        """
        first, last = self.span or (0, layers)
        if isinstance(self.decides, FirstBlockSettings):
            first, last = self.decides.blocks, layers
        found = 0.0
        for name in self.predictions:
            reuses = self.layers == "reuse" or name in reused
            left_out = {*range(first, last)} if reuses else set[int]()
            left_out |= {*(self.skip if name in SKIPPING else ())}
            found += 1 - len(left_out) / layers
        return found


class Planned(NamedTuple):
    """A step, and how it combines what earlier steps kept.

    Args:
        step: what it computes.
        weights: of what was kept, the newest first; empty for a step that reuses nothing.
        threshold: of a step that decides; below 0 it is to compute.
    """

    step: Step
    weights: tuple[float, ...] = ()
    threshold: float = 0.0

    @property
    def letter(self) -> str:
        """As in a schedule: X computes, . reuses, ? decides."""
        if self.step.layers == "decide" and self.threshold >= 0:
            return DECIDE
        return REUSE if self.step.layers == "reuse" else COMPUTE


def plan_steps(
    fast: FastSettings | None,
    experts: Sequence[int],
    guided: bool | Sequence[bool],
    layers: int,
    facts: Facts | None = None,
) -> tuple[Planned, ...]:
    """Decide what each step computes.

    A step computes, whatever the schedule says, if nothing that it needs was kept: the first step
    of a model, whose layers are not those of the model before, and the first one of a prediction
    that the step before did not have.

    Args:
        fast: `sampling.fast`.
        experts: numbers of the steps of each model, in their order.
        guided: whether the run has classifier-free guidance, or each model has.
        layers: of a model.
        facts: of the run, which a curve is of.

    Raises:
        ConfigError: settings that do not fit the run.
        ConfigErrors: a curve that does not, or keys that no step has.
    """
    fast = fast or FastSettings()
    each = [guided] * len(experts) if isinstance(guided, bool) else guided
    guides = [guides for steps, guides in zip(experts, each, strict=True) for _ in range(steps)]
    if fast.preset is not None and sum(experts) < FEW:
        rule = f"it gains next to nothing in fewer than {FEW} steps, and the run has {sum(experts)}"
        raise ConfigError("sampling.fast.preset", fast.preset, rule, "leave it out")
    how = fast.guidance
    if how is not None and not any(guides):
        _check_one(how)
    if how is not None and how.zero_steps >= sum(experts):
        rule = f"the model is called in at least one of the {sum(experts)} steps"
        raise ConfigError("sampling.fast.guidance.zero_steps", how.zero_steps, rule, "lower it")
    guidance = list(_guidance(how, experts, guides))
    skips = _skips(fast.guidance, sum(experts), layers)
    kernels = _kernels(fast.kernels, sum(experts))
    if fast.cache is not None and layers == 1:
        check_one_layer(fast.cache)
    check_calibrated(fast.cache, sum(experts), facts)
    cache = filled(fast.cache)
    schedule = letters_of(cache, experts, layers, facts)
    begins = {sum(experts[:n]) for n in range(len(experts))}
    gates = "gate" in guidance
    planned: list[Planned] = []
    computed: list[int] = []
    dynamic, span = (None, None) if cache is None else (cache.dynamic, cache.layers)
    for i, (letter, kind) in enumerate(zip(schedule, guidance, strict=True)):
        keeps = bool({REUSE, DECIDE} & set(schedule[i + 1 :]))
        step = Step("compute", kind, keeps, span if keeps else None, gates and kind == "guided")
        step = step._replace(**skips.get(i, {}), kernel=kernels.get(i))
        if kind == "zero":
            planned.append(Planned(Step(guidance="zero")))
            continue
        if i in begins or set(step.predictions) - set(planned[-1].step.predictions):
            computed = []
        if dynamic is not None:
            planned.append(_deciding(dynamic, letter, step, bool(computed)))
            computed = [i]
        elif letter == REUSE and computed:
            weights = _line(i, computed[: 1 + (cache.order if cache else 0)])
            step = step._replace(layers="reuse", keeps=False, span=span)
            planned.append(Planned(step, weights))
        else:
            planned.append(Planned(step))
            computed = [i, *computed]
    if cache is not None:
        check_reuse(cache, experts, schedule, "".join(x.letter for x in planned))
    check_idle(fast, planned, layers)
    return tuple(planned)


def _deciding(how: Dynamic, letter: str, step: Step, kept: bool) -> Planned:
    """Plan a step of a cache whose steps decide, if something was kept; else one that computes."""
    # EasyCache measures how fast predictions change in steps that are to compute, too.
    measures = step.keeps and isinstance(how, EasyCacheSettings)
    if kept and (letter == DECIDE or measures):
        step = step._replace(layers="decide", keeps=True, decides=how)
        return Planned(step, (1.0,), how.threshold if letter == DECIDE else -1.0)
    return Planned(step._replace(decides=how if step.keeps else None))


def _guidance(
    how: GuidanceSettings | None, experts: Sequence[int], guides: Sequence[bool]
) -> Iterator[Guidance]:
    """Yield the guidance of each step; `guides` says which may have any."""
    steps, how = sum(experts), how or GuidanceSettings()
    begins = {sum(experts[:n]) for n in range(len(experts))}
    begin, end = int(how.start * steps), int(how.stop * steps)
    has_difference = False
    for i in range(steps):
        # The difference of another model is not this one's.
        has_difference = has_difference and i not in begins
        if i < how.zero_steps:
            yield "zero"
        elif not guides[i] or i < begin:
            yield "none"
        elif i < end or (how.after == "gate" and not has_difference):
            has_difference = True
            yield "guided"
        else:
            yield "gate" if how.after == "gate" else "none"


def _check_one(how: GuidanceSettings) -> None:
    """Refuse what needs two predictions in a run that has one."""
    usual: dict[str, Any] = {"start": 0, "stop": 1, "after": "text"}
    usual |= {"zero_star": False, "rescale": 0}
    found = {key: getattr(how, key) for key in usual}
    if how.skip is not None:  # which makes two predictions of one
        found |= {"rescale": 0, "skip.prediction": how.skip.prediction}
        usual["skip.prediction"] = "third"
    rule = "it is about two predictions, and a run without guidance has one"
    remedy = "raise sampling.guidance_scale above 1 (Flux.1: true_cfg_scale), or remove it"
    changed = [key for key, value in found.items() if value != usual[key]]
    if changed:
        raise ConfigErrors(
            [ConfigError(f"sampling.fast.guidance.{x}", found[x], rule, remedy) for x in changed]
        )


def _skips(how: GuidanceSettings | None, steps: int, layers: int) -> dict[int, dict[str, Any]]:
    """Return the layers that the steps skip, by the number of the step."""
    skip = None if how is None else how.skip
    if skip is None:
        return {}
    if layers == 1:
        rule = "a prediction skips some of the layers, and this model has one, as SDXL's UNet"
        raise ConfigError("sampling.fast.guidance.skip", "given", rule, "remove it")
    if max(skip.layers) >= layers or len(set(skip.layers)) >= layers:
        rule = f"the model has layers 0 to {layers - 1}, and at least one of them is computed"
        raise ConfigError(
            "sampling.fast.guidance.skip.layers", list(skip.layers), rule, "name others"
        )
    # As diffusers' SkipLayerGuidance: the step at `start` itself skips nothing.
    after, end = int(skip.start * steps), int(skip.stop * steps)
    if end <= after + 1:
        rule = (
            f"from start {skip.start:g} to stop {skip.stop:g} none of the {steps} steps skips them"
        )
        remedy = "lower start or raise stop, or leave skip out"
        raise ConfigError("sampling.fast.guidance.skip", list(skip.layers), rule, remedy)
    found = {"skip": tuple(sorted(set(skip.layers))), "skip_in": skip.prediction}
    return dict.fromkeys(range(after + 1, end), found)


def _kernels(said: Sequence[KernelSettings], steps: int) -> dict[int, str]:
    """Return the kernels of the steps that have one of their own, by the number of the step."""
    found: dict[int, str] = {}
    for n, (first, last) in enumerate(each.steps for each in said):
        if last > steps:
            rule = f"the run has the steps 0 to {steps - 1}"
            remedy = f"write at most {steps} for the second number"
            raise ConfigError(f"sampling.fast.kernels[{n}].steps", [first, last], rule, remedy)
        found |= dict.fromkeys(range(first, last), said[n].attention)
    return found


def _line(i: int, computed: Sequence[int]) -> tuple[float, ...]:
    """Weigh the last computed steps, the newest first, so that a line through them is at step i."""
    if len(computed) == 1:
        return (1.0,)
    last, before = computed
    share = (i - last) / (last - before)
    return (1.0 + share, -share)


def forwards(
    planned: Sequence[Planned], layers: int, guided: bool | Sequence[bool]
) -> tuple[float, int]:
    """Count the forwards that a run computes, and those of the same run without shortcuts.

    Args:
        planned: the steps.
        layers: of a model.
        guided: whether all steps have guidance, or each has.
    """
    computed = sum(x.step.forwards(layers) for x in planned)
    twice = len(planned) * guided if isinstance(guided, bool) else sum(guided)
    return computed, len(planned) + twice


def decided_letters(
    planned: Sequence[Planned], computed: Sequence[Mapping[str, Any]]
) -> dict[str, str]:
    """Return a letter for each step of a run in which some steps decided, by the calls' names.

    A call that a step does not have is a dash.

    Args:
        planned: the steps.
        computed: of each step, whether its calls computed, by their names.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys(name for each in computed for name in each):
        letters = ""
        for each, made in zip(planned, computed, strict=True):
            if name in made:
                letters += COMPUTE if made[name] else REUSE
            else:
                calls = each.step.predictions
                there = bool(calls) if name not in CALLS else name in calls
                letters += each.letter if there else NONE
        found[name] = letters
    return found


def decided_lines(
    planned: Sequence[Planned], computed: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Say which steps of a run computed, for each of their calls; as `decided_letters`."""
    for name, letters in decided_letters(planned, computed).items():
        steps = len(letters) - letters.count(NONE)
        yield f"computed {letters.count(COMPUTE)} of {steps} steps{CALLS.get(name, '')}: {letters}"
