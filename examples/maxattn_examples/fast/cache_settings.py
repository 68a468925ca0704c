"""The section `sampling.fast.cache`: which steps reuse what an earlier step computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil
from typing import Any, Literal

from maxattn.config import Section
from maxattn.errors import ConfigError
from maxattn_examples.common.settings import Count, NotNegative, Share, Whole

from .coefficients import Polynomial, RatiosOrFile

COMPUTE, REUSE, DECIDE = "X", ".", "?"
# Keys of which one says the schedule.
KINDS = ("schedule", "interval", "shape", "magcache", "teacache", "first_block", "easycache")
DECIDING = ("first_block", "easycache")


class ShapeSettings(Section):
    """A schedule for any number of steps: the first ones compute, and then letters repeat."""

    first: Share = 0.2
    """The share of each model's steps, its first ones, that compute, rounded up."""
    then: str = ".X"
    """Letters that repeat after them: X computes, . reuses."""
    last: Share = 0.0
    """The share of each model's steps, its last ones, that compute, rounded up."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse other letters."""
        then = values["then"]
        if not then or set(then) - {COMPUTE, REUSE}:
            rule = f"its letters are {COMPUTE} (compute) and {REUSE} (reuse)"
            yield ConfigError("then", repr(then), rule, "write letters such as ..X")


class MagCacheSettings(Section):
    """A schedule from how what the layers add grows, measured once on these weights (MagCache)."""

    ratios: RatiosOrFile = None
    """A curve's YAML file, or its ratios: one a step, or a pair, with the text and without."""
    threshold: NotNegative = 0.12
    """Steps reuse while their summed error is below it; 0 computes all."""
    most: Count = 2
    """Steps that reuse in a row, at most (K)."""
    retained: Share = 0.2
    """The share of each model's steps, its first ones, that compute."""
    interpolate: bool = False
    """Take a curve of another number of steps, at the nearest of its steps."""
    calibrated: str | None = None
    """A file of examples/calibrate.py, whose settings are taken where these are not set."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse a schedule without its curve."""
        yield from _missing("ratios", values, "a schedule is computed from a curve")


class TeaCacheSettings(Section):
    """A schedule from how a model's embedding of the time changes, step by step (TeaCache)."""

    polynomial: Polynomial = None
    """Of a published model, or its coefficients, of the highest power first."""
    threshold: NotNegative = 0.05
    """Steps reuse while the summed change is below it; 0 computes all."""
    input: Literal["embedding", "modulation"] = "embedding"
    """What the polynomial is of: the embedding of the time, or the modulation made of it."""
    first: Count | None = None
    """First steps, which compute; null is 1 for the embedding, 5 for the modulation."""
    last: Whole | None = None
    """Last steps, which compute; null is 1 for the embedding, 0 for the modulation."""
    calibrated: str | None = None
    """A file of examples/calibrate.py, whose settings are taken where these are not set."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse a schedule without its polynomial."""
        yield from _missing("polynomial", values, "a schedule is computed from a polynomial")


def _missing(key: str, values: Mapping[str, Any], rule: str) -> Iterable[ConfigError]:
    if values[key] is None and values["calibrated"] is None:
        remedy = f"set {key}, or name a file of examples/calibrate.py as calibrated"
        yield ConfigError(key, "null", rule, remedy)


class FirstBlockSettings(Section):
    """Each step runs its first layers, and reuses the rest if these added what they had added."""

    threshold: NotNegative = 0.05
    """Of the mean change of what they added, relative to its mean; 0 computes all steps."""
    blocks: Count = 1
    """First layers, which every step runs."""
    first: Count = 1
    """First steps, which compute."""
    last: Whole = 0
    """Last steps, which compute."""
    calibrated: str | None = None
    """A file of examples/calibrate.py, whose settings are taken where these are not set."""


class EasyCacheSettings(Section):
    """Each step reuses the prediction if its sample moved little since the last computed one."""

    threshold: NotNegative = 0.05
    """Of the summed change that is expected of the prediction; 0 computes all steps."""
    first: Count = 10
    """First steps, which compute."""
    last: Whole = 1
    """Last steps, which compute."""
    calibrated: str | None = None
    """A file of examples/calibrate.py, whose settings are taken where these are not set."""


Dynamic = FirstBlockSettings | EasyCacheSettings
Ended = ShapeSettings | MagCacheSettings | TeaCacheSettings | Dynamic
# First and last steps that compute with TeaCache, by what its polynomial is of.
ENDS = {"embedding": (1, 1), "modulation": (5, 0)}


def ends_of(how: Ended, steps: int) -> tuple[int, int]:
    """Count the first and the last of a model's steps that compute in any case.

    Args:
        how: settings of a cache.
        steps: of the model.
    """
    if isinstance(how, ShapeSettings):
        first, last = (ceil(share * steps - 1e-9) for share in (how.first, how.last))
        return max(1, first), last
    if isinstance(how, MagCacheSettings):
        return max(1, int(how.retained * steps + 0.5)), 0
    if isinstance(how, TeaCacheSettings):
        first, last = ENDS[how.input]
        return first if how.first is None else how.first, last if how.last is None else how.last
    return how.first, how.last


class CacheSettings(Section):
    """Reuse of what layers added in an earlier step (approximate); one key says in which steps."""

    schedule: str | None = None
    """One letter a step: X computes, . reuses what the layers added in the last computed step."""
    interval: Count | None = None
    """Every so many steps compute, from the first on; for SDXL it is DeepCache's, usually 3."""
    shape: ShapeSettings | None = None
    """Shares of the steps, and letters that repeat."""
    magcache: MagCacheSettings | None = None
    """A schedule computed from a curve of these weights."""
    teacache: TeaCacheSettings | None = None
    """A schedule computed from these weights, of a model of Wan."""
    first_block: FirstBlockSettings | None = None
    """Decided in each step by what its first layers add."""
    easycache: EasyCacheSettings | None = None
    """Decided in each step by how far the sample moved."""
    order: Literal[0, 1] = 0
    """0 reuses it as it was; 1 follows the line through the last two computed steps."""
    layers: tuple[Whole, Count] | None = None
    """The first layer that is reused, and the first one after them; null: all layers."""

    @property
    def kind(self) -> str | None:
        """The key that says the schedule; None where none does."""
        return next((key for key in KINDS if getattr(self, key, None) is not None), None)

    @property
    def dynamic(self) -> Dynamic | None:
        """Settings of a cache whose steps decide as they run, if it has a threshold."""
        found = self.first_block or self.easycache
        return found if found is not None and found.threshold > 0 else None

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse schedules of other letters, or that reuse before anything was computed."""
        given = [key for key in KINDS if values.get(key) is not None]
        for key in given[1:]:
            rule = f"{given[0]} says which steps compute, and one key does"
            yield ConfigError(key, "given", rule, f"remove {key} or {given[0]}")
        schedule, layers = values["schedule"], values["layers"]
        if schedule is not None and (not schedule or set(schedule) - {COMPUTE, REUSE}):
            rule = f"it has a letter for each step, {COMPUTE} (compute) or {REUSE} (reuse)"
            yield ConfigError("schedule", repr(schedule), rule, "write one such as XX.X.")
        elif schedule and schedule[0] != COMPUTE:
            rule = "the first step has nothing to reuse"
            yield ConfigError("schedule", schedule, rule, f"begin it with {COMPUTE}")
        if layers is not None and layers[0] >= layers[1]:
            rule = "they are the first layer that is reused, and the first one after them"
            yield ConfigError("layers", list(layers), rule, "write the smaller number first")
        dynamic = next((key for key in given if key in DECIDING), None)
        if dynamic is None:
            return
        if layers is not None:
            instead = "first_block.blocks" if dynamic == "first_block" else "schedule"
            rule = f"{dynamic} reuses {'the rest' if dynamic == 'first_block' else 'predictions'}"
            yield ConfigError("layers", list(layers), rule, f"leave it out, or set {instead}")
        if values["order"]:
            rule = f"{dynamic} reuses what the last computed step had, as it was"
            yield ConfigError("order", values["order"], rule, "leave it out, or write a schedule")
