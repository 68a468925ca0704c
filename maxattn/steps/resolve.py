"""`resolve`: make `Steps` from settings and the facts of a run, before it starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config.numbers import whole
from maxattn.errors import ConfigError, brief
from maxattn.steps.schedule import letters_of
from maxattn.steps.settings import COMPUTE, DECIDE, REUSE, GuidanceSettings, StepSettings
from maxattn.steps.value import USUAL, Mix, Step, Steps

Settings = StepSettings | None


def resolve(
    settings: Settings | Sequence[Settings],
    steps: int | Sequence[int],
    layers: int,
    guided: bool | Sequence[bool] = False,
    setting: str = "steps",
) -> Steps:
    """Decide what each step of a run computes.

    A step computes whatever its letter says if it is the first of its model, or if one of its
    predictions is new or skips other layers than in the step before.

    Args:
        settings: of the run; or one for each model of a pipeline of several.
        steps: number of steps; or of each model, in the order in which they run.
        layers: number of layers of the model, in all its calls of `ma.blocks`.
        guided: whether the run has classifier-free guidance; or whether each model has.
        setting: what errors name the settings by; default "steps".

    Raises:
        ConfigError: settings that do not fit the number of steps, the layers or the guidance, or
            that change no step of the run.

    >>> cache = {"first_block": {"threshold": 0.1, "first": 2}, "order": 1}
    >>> print(ma.steps.resolve(ma.steps.StepSettings(cache=cache), 10, layers=30, guided=True))
    steps     layers                predictions   forwards
    1 to 2    computed              two           4
    3 to 10   1 computed, rest: ?   two           16
    approximate: at most 20 of 20 forwards are computed, 100%
    schedule XX????????
    """
    counts: list[Any] = [*steps] if isinstance(steps, tuple | list) else [steps]
    # One model of several may take no step.
    for name, number, least in (*(("steps", n, 0) for n in counts), ("layers", layers, 1)):
        if whole(number, least) is None:
            rule = f"it is a whole number from {least}"
            raise ConfigError(name, brief(number), rule, "give such a number")
    alike = not isinstance(settings, tuple | list)
    each: list[Any] = [settings] * len(counts) if alike else [*settings]
    guides: list[Any] = [*guided] if isinstance(guided, Sequence) else [guided] * len(counts)
    for name, values, kind in ((setting, each, StepSettings | None), ("guided", guides, object)):
        if len(values) != len(counts) or not all(isinstance(x, kind) for x in values):
            rule = f"it is one value (of settings, StepSettings) for each of {len(counts)} models"
            raise ConfigError(name, brief(values), rule, "give one for each, or one for all")
    every = tuple(bool(g) for n, g in zip(counts, guides, strict=True) for _ in range(n))
    places = [setting] + [setting if alike else f"{setting}_{m + 1}" for m in range(1, len(each))]

    def made(each: Sequence[Settings]) -> Steps:
        found: list[Step] = []
        for m, (own, place) in enumerate(zip(each, places, strict=True)):
            own = own or StepSettings()
            kinds = [*_kinds(own, every, layers, place)][len(found) :][: counts[m]]
            letters = letters_of(own.cache, counts, m, layers, f"{place}.cache")
            found += _steps_of(own, letters, kinds)
        numbered = (replace(s, number=i, model_layers=layers) for i, s in enumerate(found))
        return Steps(tuple(numbered), layers, every)

    steps_of_run = made(each)
    for m, place in enumerate(places[:1] if alike else places):
        for path, value, less in _without_one(each[m] or StepSettings(), any(every)):
            others = [less] * len(each) if alike else [*each[:m], less, *each[m + 1 :]]
            if _effect(made(others)) == _effect(steps_of_run):
                facts = " and ".join(f"{n} steps {'with' if g else 'without'} guidance"
                                     for n, g in zip(counts, guides, strict=True))  # fmt: skip
                rule = f"it changes no step of the run, which has {facts}"
                raise ConfigError(f"{place}.{path}", value, rule, "leave it out, or change others")
    return steps_of_run


def _effect(steps: Steps) -> tuple[Step, ...]:
    """Return the steps without the number of saved sums, which changes no sample."""
    return tuple(s if s.blocks else replace(s, keeps=min(s.keeps, 1)) for s in steps)


def _without_one(own: StepSettings, guided: bool) -> Iterator[tuple[str, object, StepSettings]]:
    """Yield each key that is set, its value, and the settings without it.

    Skip keys that are off, and shares of guided steps, which may round to none.
    """
    for name, part in (("cache", own.cache), ("guidance", own.guidance)):
        if part is None:
            continue
        for key in sorted(part.changed):
            value = getattr(part, key)
            off = getattr(value, "threshold", None) == 0 or key == "schedule"
            off |= guided and key in ("start", "stop")
            if not off and not (key == "first_block" and getattr(part, "schedule", None)):
                less = type(part)(**{k: getattr(part, k) for k in part.model_fields_set - {key}})
                shown = value if isinstance(value, int | float | str) else "given"
                yield f"{name}.{key}", shown, own.replace(**{name: less})


def _steps_of(own: StepSettings, letters: str, kinds: Sequence[Step]) -> Iterator[Step]:
    """Yield the steps of a model by their letters; `kinds` have their guidance and attention."""
    cache = own.cache
    order, span = (0, None) if cache is None else (cache.order, cache.layers)
    decides = None if cache is None or DECIDE not in letters else cache.first_block
    computed: list[int] = []
    names: set[tuple[str, bool]] = set()
    for i, (letter, step) in enumerate(zip(letters, kinds, strict=True)):
        own_names = {(name, bool(step.skipped_in(name))) for name in step.predictions}
        computed = [] if own_names - names else computed
        names, later = own_names, {*letters[i + 1 :]} - {COMPUTE}
        if not names:
            yield step
        elif decides is not None and (later or letter != COMPUTE):
            step = replace(step, blocks=decides.blocks, keeps=order + 1)
            if computed:
                threshold = {COMPUTE: -1.0, REUSE: float("inf"), DECIDE: decides.threshold}[letter]
                most = decides.most if letter == DECIDE else 2**30
                step = replace(step, layers="decide", threshold=threshold, most=most)
            computed = [i]
            yield step
        elif letter == REUSE and computed:
            weights = _line(i, computed[: order + 1])
            yield replace(step, layers="reuse", span=span, weights=weights)
        else:
            computed = [i, *computed]
            yield replace(step, keeps=order + 1, span=span) if later else step


def _line(i: int, computed: Sequence[int]) -> tuple[float, ...]:
    """Return weights that extrapolate the sums of the last computed steps to step i."""
    if len(computed) == 1:
        return (1.0,)
    share = (i - computed[0]) / (computed[0] - computed[1])
    return (1.0 + share, -share)


def _kinds(own: StepSettings, every: Sequence[bool], layers: int, place: str) -> Iterator[Step]:
    """Yield a step for each one of the run, with its guidance, skipped layers and attention."""
    n, how = len(every), own.guidance or GuidanceSettings()
    if how.zero_steps >= n > 0:
        rule = f"the model is called in at least one of the {n} steps"
        raise ConfigError(f"{place}.guidance.zero_steps", how.zero_steps, rule, "lower it")
    skip, skipping = how.skip, range(0)
    if skip is not None:
        if max(skip.layers) >= layers or len({*skip.layers}) >= layers:
            rule = f"the model has layers 0 to {layers - 1}, and computes at least one of them"
            remedy = "name others, or leave skip out"
            raise ConfigError(f"{place}.guidance.skip.layers", list(skip.layers), rule, remedy)
        # As diffusers' SkipLayerGuidance: the step at `start` itself skips nothing.
        skipping = range(int(skip.start * n) + 1, int(skip.stop * n))
    attention = _attention(own, n, place)
    for i, guides in enumerate(every):
        two = guides and int(how.start * n) <= i < int(how.stop * n)
        step = Step(guidance="zero" if i < how.zero_steps else "two" if two else "one")
        third = skip is not None and skip.prediction == "third"
        if skip is not None and i in skipping and step.predictions and (two or third):
            step = replace(step, skip=tuple(sorted({*skip.layers})), skip_in=skip.prediction)
        if len(step.predictions) > 1:
            scale = skip.scale if skip is not None and step.skip else USUAL.third_scale
            step = replace(step, mix=Mix(how.zero_star and two, how.rescale, scale))
        settings = {k: x for steps, given in attention if i in steps for k, x in given.items()}
        yield replace(step, attention=tuple(sorted(settings.items())))


def _attention(own: StepSettings, n: int, place: str) -> list[tuple[range, dict[str, Any]]]:
    """Return the step numbers of each attention setting, and the overrides in them."""
    found = []
    for number, each in enumerate(own.attention):
        if each.steps[1] > n:
            rule, remedy = f"the run has the steps 0 to {n - 1}", f"end it at {n} or before"
            raise ConfigError(f"{place}.attention[{number}].steps", list(each.steps), rule, remedy)
        config = AttentionConfig.from_overrides(each.overrides)
        given = {key: getattr(config, key) for key in config.model_fields_set}
        found.append((range(*each.steps), given))
    return found
