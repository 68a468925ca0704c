"""Thresholds and polynomials that examples/calibrate.py found on these weights, from its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError

from .cache_settings import CacheSettings
from .curves import Facts, differences, read_curve

SETTING = "sampling.fast.cache"


def filled(cache: CacheSettings | None) -> CacheSettings | None:
    """Return settings of a cache with those of the file that they name; their own keys come first.

    Raises:
        ConfigError: there is no such file, or it has nothing for this cache.
        ConfigErrors: what it has does not fit.
    """
    kind = None if cache is None else cache.kind
    own = None if kind is None else getattr(cache, kind)
    name = getattr(own, "calibrated", None)
    if cache is None or kind is None or own is None or name is None:
        return cache
    setting = f"{SETTING}.{kind}.calibrated"
    file = read_curve(setting, name)
    said: Mapping[str, Any] | None = getattr(file, kind)
    if said is None:
        rule = f"it has a section {kind}, with a threshold that was found on these weights"
        raise ConfigError(setting, name, rule, "write it with examples/calibrate.py")
    if kind == "magcache":
        said = {"ratios": file.ratios, **said}
    given = {key: getattr(own, key) for key in own.model_fields_set - {"calibrated"}}
    whole: dict[str, Any] = {key: getattr(cache, key) for key in cache.model_fields_set}
    try:
        return CacheSettings(**{**whole, kind: {**said, **given}})
    except ConfigErrors as errors:
        problems = (
            ConfigError(setting, f"{name}: {x.setting} {x.value}", x.rule, x.remedy)
            for x in errors.problems
        )
        raise ConfigErrors(list(problems)) from None


def check_calibrated(cache: CacheSettings | None, steps: int, facts: Facts | None) -> None:
    """Refuse the file of a cache that is of another run.

    Args:
        cache: as it was set, before `filled`.
        steps: of the run.
        facts: of the run.

    Raises:
        ConfigErrors: with all that differs.
    """
    own = None if cache is None or cache.kind is None else getattr(cache, cache.kind)
    name = getattr(own, "calibrated", None)
    if cache is None or name is None:
        return
    setting = f"{SETTING}.{cache.kind}.calibrated"
    file = read_curve(setting, name)
    problems = [] if facts is None else list(differences(file, facts, setting, name))
    if len(file.ratios) != steps and cache.kind != "magcache":
        rule = f"it was measured in {len(file.ratios)} steps, and the run has {steps}"
        remedy = f"set num_inference_steps={len(file.ratios)}, or measure in {steps} steps"
        problems.append(ConfigError(setting, name, rule, remedy))
    if problems:
        raise ConfigErrors(problems)
