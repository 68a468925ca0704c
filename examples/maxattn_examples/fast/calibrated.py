"""Thresholds and polynomials that examples/calibrate.py found on these weights, from its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError

from .cache_settings import CacheSettings
from .curves import Facts, LeftOut, differences, read_curve
from .schedules import FEW

SETTING = "sampling.fast.cache"
# A key of a cache, and what was measured with its value.
MEASURED_WITH = {"teacache": ("input", "polynomial"), "first_block": ("blocks", "threshold")}


def filled(cache: CacheSettings | None) -> CacheSettings | None:
    """Return settings of a cache with those of the file that they name; their own keys come first.

    Raises:
        ConfigError: there is no such file, or it has nothing for this cache, or a key that replaces
            one of the file is not what another one was measured with.
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
        why = (file.left_out or {}).get(kind)
        rule, remedy = lacking(len(file.ratios), file.share, why)
        raise ConfigError(setting, name, f"it has no section {kind}: {rule}", remedy)
    if kind == "magcache":
        said = {"ratios": file.ratios, **said}
    given = {key: getattr(own, key) for key in own.model_fields_set - {"calibrated"}}
    key, of_it = MEASURED_WITH.get(kind, ("", ""))
    if key in given and of_it not in given and given[key] != (before := said.get(key)):
        rule = f"the {of_it} of {name} was measured with {key} {before}"
        remedy = f"leave {key} out, or set {of_it} too"
        raise ConfigError(f"{SETTING}.{kind}.{key}", given[key], rule, remedy)
    whole: dict[str, Any] = {key: getattr(cache, key) for key in cache.model_fields_set}
    try:
        return CacheSettings(**{**whole, kind: {**said, **given}})
    except ConfigErrors as errors:
        problems = (
            ConfigError(setting, f"{name}: {x.setting} {x.value}", x.rule, x.remedy)
            for x in errors.problems
        )
        raise ConfigErrors(list(problems)) from None


def lacking(steps: int, share: float | None, why: LeftOut | None = None) -> tuple[str, str]:
    """Return why a file has no settings of a cache, and the remedy.

    Args:
        steps: that were measured.
        share: of them that compute, at most; None of a file that says none.
        why: it was left out; None of a file that does not say.
    """
    if why == "steps" or steps < FEW:
        rule = f"{steps} steps were measured, and caches gain next to nothing in fewer than {FEW}"
        return rule, f"run examples/calibrate.py with num_inference_steps={FEW} or more"
    if why == "times":
        rule = "the model's embedding is not of the time alone, or LoRA weights change it"
        return rule, "name another cache, such as magcache or first_block"
    if share is None:
        return "the file was not written for it", "write it with examples/calibrate.py"
    more = 0.5 if share < 0.5 else 1
    rule = f"no threshold computes at most a share of {share:g} of the {steps} steps"
    return rule, f"run examples/calibrate.py with a larger --share, such as {more:g}"


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
        same = f"set num_inference_steps={len(file.ratios)}, or "
        remedy = f"{same if len(file.ratios) >= FEW else ''}measure in {steps} steps"
        problems.append(ConfigError(setting, name, rule, remedy))
    if problems:
        raise ConfigErrors(problems)
