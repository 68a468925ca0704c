"""Keys of `sampling.fast` that no step of a run has: they are refused, since they do nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError

from .settings import CacheSettings, FastSettings, GuidanceSettings

if TYPE_CHECKING:
    from .steps import Planned


def check_idle(fast: FastSettings, planned: Sequence[Planned], layers: int) -> None:
    """Refuse keys that no step has, of steps that are planned; not those of a preset.

    Args:
        fast: `sampling.fast`.
        planned: the steps.
        layers: of a model.

    Raises:
        ConfigErrors: with each such key.
    """
    found = [*_of_kernels(fast, planned, layers)]
    if fast.cache is not None:
        found += _of_cache(fast.cache, planned, fast.preset is not None)
    if fast.guidance is not None:
        found += _of_guidance(fast.guidance, planned)
    if found:
        raise ConfigErrors(
            [ConfigError(f"sampling.fast.{x.setting}", x.value, x.rule, x.remedy) for x in found]
        )


def _of_cache(
    cache: CacheSettings, planned: Sequence[Planned], preset: bool
) -> Iterator[ConfigError]:
    own = {"order": cache.order, "layers": None if cache.layers is None else list(cache.layers)}
    for key, value in own.items() if cache.kind is None else ():
        if value:
            rule = "it is about steps that reuse what layers added, and no key says which these are"
            remedy = "set sampling.fast.cache.interval=3 beside it, or leave it out"
            yield ConfigError(f"cache.{key}", value, rule, remedy)
    reuse = [len(x.weights) for x in planned if x.step.layers == "reuse"]
    if reuse and cache.order and max(reuse) == 1 and not preset:
        rule = "a line is through two computed steps, and no step that reuses has two before it"
        remedy = "leave it out, or compute two steps before the first one that reuses"
        yield ConfigError("cache.order", cache.order, rule, remedy)


def _of_guidance(how: GuidanceSettings, planned: Sequence[Planned]) -> Iterator[ConfigError]:
    found, skips = {x.step.guidance for x in planned}, any(x.step.skips for x in planned)
    late = planned[int(how.stop * len(planned)) :]  # a gate guides until there is a difference
    is_off = how.stop == 1 and "stop" in how.model_fields_set
    acts = {x.step.guidance for x in late} & {"gate", "guided"}
    if how.after == "gate" and not acts and not is_off:
        why = "stop=1 leaves none" if how.stop == 1 else "the models of these are not guided"
        rule = f"a gate acts in the steps from stop on, and {why}"
        yield ConfigError("guidance.after", how.after, rule, "lower stop, or leave it out")
    two = "it is about two predictions of a step, and no step has two to mix"
    mixed = skips or bool(found & {"guided", "gate"})
    for key, idle in (("zero_star", "guided" not in found), ("rescale", not mixed)):
        if idle and (value := getattr(how, key)):
            remedy = "guide some steps (start, stop, zero_steps), or leave it out"
            yield ConfigError(f"guidance.{key}", value, two, remedy)
    if how.skip is not None and not skips:
        rule = f"no step from start {how.skip.start:g} to stop {how.skip.stop:g} has a prediction"
        rule += " that skips layers: "
        rule += "none is guided" if how.skip.prediction == "negative" else "all predict zeros"
        remedy = "lower start or raise stop, or leave skip out"
        yield ConfigError("guidance.skip", list(how.skip.layers), rule, remedy)


def _of_kernels(
    fast: FastSettings, planned: Sequence[Planned], layers: int
) -> Iterator[ConfigError]:
    for n, each in enumerate(fast.kernels):
        if not any(x.step.forwards(layers) for x in planned[slice(*each.steps)]):
            rule = (
                "these steps compute no layer: they reuse what all layers added, or predict zeros"
            )
            remedy = "name steps that compute layers, or leave it out"
            yield ConfigError(f"kernels[{n}].steps", list(each.steps), rule, remedy)
