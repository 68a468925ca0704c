"""The section `sampling.fast`: settings of `maxattn.steps`, presets, and curve files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import model_validator

from maxattn.config import ConfigErrors, Section
from maxattn.errors import ConfigError
from maxattn.steps import StepSettings

PRESETS = Path(__file__).with_name("presets.yml")
CURVE = "sampling.fast.cache.magcache.ratios"
# Removed keys, and their replacements.
OLD = {
    "kernels": "write attention: [{steps: [0, 10], overrides: [attention=cudnn]}]",
    "measured": "remove it; examples/compare.py measures the drift of these settings",
    "guidance.after": "remove it; from stop on steps predict with the text alone",
    "cache.teacache": "set cache.shape or cache.magcache instead",
    "cache.easycache": "set cache.first_block instead",
    "cache.magcache.calibrated": "set ratios to the curve's file, and threshold",
    "cache.first_block.calibrated": "set threshold",
}


class FastSettings(StepSettings):
    """Settings that reduce the forwards of sampling; each is an approximation."""

    preset: Literal["gentle", "balanced", "fast"] | None = None
    """Settings of sample/presets.yml for the model's family, which other keys replace."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_keys(cls, data: Any) -> Any:
        found = []
        for path, remedy in OLD.items():
            *above, key = path.split(".")
            inner = data
            for name in above:
                inner = inner.get(name) if isinstance(inner, Mapping) else None
            if isinstance(inner, Mapping) and key in inner:
                found.append(ConfigError(path, inner[key], "maxattn 0.4 has no such key", remedy))
        if found:
            raise ConfigErrors(found)
        return data


def settled(fast: FastSettings, family: str) -> FastSettings:
    """Fill in the values of a preset for keys that are not set.

    Args:
        fast: `sampling.fast`.
        family: wan, sdxl or flux.
    """
    if fast.preset is None:
        return fast
    usual = dict(_presets()[family][fast.preset])
    if fast.cache is not None and fast.cache.kind not in (None, "shape"):
        del usual["cache"]  # its order and layers are of its own kind
    return FastSettings(**_over(usual, fast))


@cache
def _presets() -> Mapping[str, Mapping[str, Any]]:
    """Read the presets: sections by name, by family."""
    return yaml.safe_load(PRESETS.read_text("utf-8"))


def _over(usual: Mapping[str, Any], given: Section) -> dict[str, Any]:
    """Merge set values into default ones, section by section."""
    found = dict(usual)
    for key in given.model_fields_set:
        value, before = getattr(given, key), usual.get(key)
        if isinstance(value, Section) and isinstance(before, Mapping):
            value = _over(before, value)
        found[key] = value
    return found


# ---- curves --------------------------------------------------------------------------------------


def with_curve(
    fast: FastSettings | None, facts: Callable[[], Mapping[str, Any]]
) -> FastSettings | None:
    """Replace the name of a curve file by the ratios that it has.

    Args:
        facts: returns `curve_facts` of the run; called only if a file is named, because it reads
            the weights.

    Raises:
        ConfigErrors: the file cannot be read, or was measured with other facts.
    """
    how = None if fast is None or fast.cache is None else fast.cache.magcache
    if fast is None or fast.cache is None or how is None or not isinstance(how.ratios, str):
        return fast
    said = _read(how.ratios)
    if problems := [*differences(said, facts(), how.ratios)]:
        raise ConfigErrors(problems)
    try:
        own = how.replace(ratios=said["ratios"])
    except ConfigErrors as error:
        found = (ConfigError(CURVE, f"{how.ratios}: {x.value}", x.rule, x.remedy)
                 for x in error.problems)  # fmt: skip
        raise ConfigErrors(found) from None
    return fast.replace(cache=fast.cache.replace(magcache=own))


def differences(
    said: Mapping[str, Any], facts: Mapping[str, Any], name: str
) -> Iterator[ConfigError]:
    """Yield an error for each fact of a curve file that differs from the run's.

    Facts that the file leaves out are not compared, except weights: if the file has the hash of
    any,
    it was measured without those that it does not name.
    """
    theirs = {**dict.fromkeys([key for key in facts if key.startswith("checkpoint")]), "lora": []}
    theirs = {**(theirs if "checkpoint" in said else {}), **said, **said.get("sizes", {})}
    for key in (key for key in facts if key in theirs):
        ours, other = facts[key], theirs[key]
        alike = isinstance(ours, float) and isinstance(other, int | float)
        if (abs(ours - other) > 1e-6) if alike else ours != other:
            rule = f"it was measured with this {key}, and the run has {ours}"
            remedy = "measure a curve with examples/calibrate.py, or write a schedule"
            yield ConfigError(CURVE, f"{name}: {key} {other}", rule, remedy)


def _read(name: str) -> dict[str, Any]:
    try:
        said = yaml.safe_load(Path(name).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        rule = f"it names the YAML file of a curve, and reading it failed: {error}"
        remedy = "name one, such as configs/curves/magcache_wan_2_1_t2v_1_3b.yml"
        raise ConfigError(CURVE, name, rule, remedy) from None
    if not isinstance(said, dict) or not isinstance(said.get("ratios"), list):
        rule = "it has a mapping, with the key ratios"
        raise ConfigError(CURVE, name, rule, "write `ratios: [1, 0.99, ...]`")
    return said
