"""How models and LoRA of few steps are sampled: `sampling.distilled` names a row of distilled.yml.

Such a model was trained for one sampler, at its own times, with guidance in its weights. With other
settings its samples are soft or broken, so such settings are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from maxattn.errors import ConfigError, did_you_mean
from maxattn_examples.samplers.flow import shifted
from maxattn_examples.samplers.sampler import KEYS, RENOISING, Given, Key, clean_end

TABLE = Path(__file__).with_suffix(".yml")
ALIKE = 1e-3  # two sigmas that differ by less are one


@dataclass(frozen=True)
class Distilled:
    """A row of distilled.yml, which describes the fields."""

    name: str
    family: str
    of: str
    sampler: str
    steps: tuple[int, ...]
    guidance: float
    source: str
    lora: tuple[str, ...] = ()
    timesteps: tuple[float, ...] = ()
    sigmas: tuple[float, ...] = ()
    warped: bool | None = None
    shift: float | None = None
    embedded: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    scales_noise: bool = False
    lora_scale: float = 1.0

    def given(self, steps: int) -> Given | None:
        """Return the row's times or sigmas for `steps`; None if the sampler's own are used."""
        for key in KEYS:
            if values := getattr(self, key):
                return Given(key, values[: steps if steps in self.steps else None], self.warped)
        return None

    def settled(self, values: Mapping[str, Any], given: Set[str], cfg: str) -> dict[str, Any]:
        """Return values for the settings that the user left out.

        Args:
            values: all values of the section `sampling`.
            given: the keys that the user set.
            cfg: the key of classifier-free guidance.
        """
        found: dict[str, Any] = {} if cfg in given else {cfg: 1.0}
        if "num_inference_steps" not in given:
            own = Given.of(values)
            found["num_inference_steps"] = len(own.values) if own else self.steps[0]
        unset = {"sampler": self.sampler, "timestep_shift": self.shift}
        if cfg != "guidance_scale":
            unset["guidance_scale"] = self.embedded
        found |= {key: x for key, x in unset.items() if key in values and values[key] is None}
        steps = found.get("num_inference_steps", values["num_inference_steps"])
        ours = self.given(steps) if steps in self.steps else None
        if ours is not None and all(values[key] is None for key in KEYS):
            found[ours.key] = ours.values
            if "warped" in values and values["warped"] is None:
                found["warped"] = ours.warped
        return found

    def errors(self, values: Mapping[str, Any], cfg: str) -> Iterator[ConfigError]:
        """Yield an error for each setting that differs from the model's distillation.

        Args:
            values: of the section `sampling`, after `settled`.
            cfg: the key of classifier-free guidance.
        """
        if (theirs := values["sampler"]) != self.sampler:
            ours, other = (
                "re-noise" if x in RENOISING else "are deterministic"
                for x in (self.sampler, theirs)
            )
            rule = f"{self.name} takes the steps of {self.sampler}, which {ours}"
            rule += f"; those of {theirs} {other}" if ours != other else ""
            yield self._error("sampler", theirs, rule, self.sampler)
        problems = [*self._list_errors(values)]
        yield from problems or self._count_errors(values)
        if self.shift is not None and values["timestep_shift"] != self.shift:
            rule = f"{self.name} was distilled with shift {self.shift:g}"
            yield self._error("timestep_shift", values["timestep_shift"], rule, f"{self.shift:g}")
        yield from self._guidance_errors(values, cfg)

    def _error(self, key: str, value: Any, rule: str, instead: Any) -> ConfigError:
        return ConfigError(key, value, rule, f"set sampling.{key}={instead}, or leave it out")

    def _count_errors(self, values: Mapping[str, Any]) -> Iterator[ConfigError]:
        if (steps := values["num_inference_steps"]) not in self.steps:
            *others, last = sorted(self.steps)
            known = f"{', '.join(map(str, others))} or {last}" if others else last
            rule = f"{self.name} is of {known} steps"
            yield self._error("num_inference_steps", steps, rule, self.steps[0])

    def _list_errors(self, values: Mapping[str, Any]) -> Iterator[ConfigError]:
        theirs, ours = Given.of(values), self.given(values["num_inference_steps"])
        if theirs is None or (ours is not None and self._alike(theirs, ours)):
            return
        if ours is None:
            options = (f", {key} {value}" for key, value in self.options.items())
            rule = f"{self.name} needs {self.sampler}'s own times{''.join(options)}"
            yield ConfigError(theirs.key, theirs, rule, "leave it out")
            return
        how = {None: "", True: ", final values", False: f", before shift {self.shift or 1:g}"}
        rule = f"{self.name} was distilled at {ours.key} {ours}{how[ours.warped]}"
        if (theirs.key, theirs.values) == (ours.key, ours.values):
            written = "true" if ours.warped else "false"
            yield self._error("warped", "false" if ours.warped else "true", rule, written)
            return
        remedy = "leave out sampling.timesteps, sigmas and warped: distilled sets them"
        yield ConfigError(theirs.key, theirs, rule, remedy)

    def _alike(self, theirs: Given, ours: Given) -> bool:
        # Without a shift of the model's own, a list before a shift is another one.
        if self.family == "sdxl" or (self.shift is None and not theirs.warped):
            return theirs == ours
        one, other = (self._final(x) for x in (theirs, ours))
        return len(one) == len(other) and bool((abs(one - other) < ALIKE).all())

    def _final(self, given: Given) -> np.ndarray:
        """Return a list's sigmas after the shift, if it still has to be applied."""
        sigmas = np.array(given.values) / (1000 if given.key == "timesteps" else 1)
        return sigmas if given.warped or self.shift is None else shifted(sigmas, self.shift)

    def _guidance_errors(self, values: Mapping[str, Any], cfg: str) -> Iterator[ConfigError]:
        for key in (cfg, f"{cfg}_2"):
            value = values.get(key)
            if value is not None and value > self.guidance:
                rule = f"{self.name} has guidance in its weights: at most {self.guidance:g}"
                rule += ", which is none" if self.guidance <= 1 else ""
                yield self._error(key, value, rule, 1)
        told = values["guidance_scale"]
        if cfg != "guidance_scale" and told != self.embedded:
            value = "no guidance" if self.embedded is None else f"a guidance of {self.embedded}"
            instead = "null" if self.embedded is None else self.embedded
            yield self._error("guidance_scale", told, f"{self.name} is told {value}", instead)


@cache
def table() -> Mapping[str, Distilled]:
    """Read the table, by name."""
    found = yaml.safe_load(TABLE.read_text("utf-8"))
    lists: dict[str, dict[str, Any]] = {
        name: {k: tuple(x) if isinstance(x, list) else x for k, x in row.items()}
        for name, row in found.items()
    }
    return {name: Distilled(name, **row) for name, row in lists.items()}


def of(name: str | None) -> Distilled | None:
    """Return a row of the table; None if the name is None or unknown."""
    return table().get(name or "")


def name_errors(name: str | None, family: str) -> Iterator[ConfigError]:
    """Yield an error for a name that is not in the table, or belongs to another family."""
    if name is None:
        return
    names = [x.name for x in table().values() if x.family == family]
    if name not in names:
        found = of(name)
        rule = f"it is one of {', '.join(names)}"
        rule += f", and {name} is {found.of}" if found else ""
        remedy = did_you_mean(name, names) or f"set sampling.distilled={names[0]}, or leave it out"
        remedy = f"use examples/generate.py {found.family}" if found else remedy
        yield ConfigError("distilled", name, rule, remedy)


def named_by(lora: Path) -> Distilled | None:
    """Return the row whose LoRA file names match this path."""
    name = "/".join(lora.parts[-2:]).lower()
    rows = table().values()
    return next((row for row in rows if any(fnmatch(name, x) for x in row.lora)), None)


# ---- lists of times or sigmas --------------------------------------------------------------------


def list_errors(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for each list of times or sigmas that no sampler can use.

    Args:
        values: all values of the section `sampling`.
    """
    lists: list[Key] = [key for key in KEYS if values[key] is not None]
    for key in lists:
        if not values[key]:
            rule = "a list has a value for each step"
            yield ConfigError(key, "[]", rule, f"leave it out for the sampler's own {key}")
        elif any(b >= a for a, b in pairwise(values[key])):
            rule = "steps go from noise to clean, so each value is below the one before it"
            falling = Given(key, tuple(sorted({*values[key]}, reverse=True)))
            yield ConfigError(key, Given(key, values[key]), rule, f"write {falling}")
        elif values[key] == (clean_end(key, values),):
            rule = "0 is the clean end, where the last step ends, so no step begins there"
            remedy = f"write values above 0 before it, or leave it out for the sampler's own {key}"
            yield ConfigError(key, "[0]", rule, remedy)
    if len(lists) == 2:
        rule = "timesteps and sigmas are two ways to write one list"
        yield ConfigError("sigmas", Given("sigmas", values["sigmas"]), rule, "write one of them")
    yield from _length_errors(values)
    yield from _warped_errors(values, lists)


def unmoved_errors(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield an error for a shift that has no effect, since a list has final values.

    Args:
        values: of the section `sampling`, after `settled`; no model sets its own shift.
    """
    given, shift = Given.of(values), values.get("timestep_shift")
    if given is not None and given.warped and shift is not None:
        by = values["distilled"]
        rule = f"it has no effect, since {given.key} {given} are final (warped: true)"
        rule += f", as distilled={by} sets them" if by else ""
        remedy = "set sampling.timestep_shift=null, or leave it out"
        yield ConfigError("timestep_shift", f"{shift:g}", rule, remedy)


def _length_errors(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    given, steps = Given.of(values), values["num_inference_steps"]
    if given is not None and given.values and steps != len(given.values):
        rule = f"sampling.{given.key} {given} has {len(given.values)} values, one for each step"
        remedy = f"set sampling.num_inference_steps={len(given.values)}, or leave it out"
        yield ConfigError("num_inference_steps", steps, rule, remedy)


def _warped_errors(values: Mapping[str, Any], lists: list[Key]) -> Iterator[ConfigError]:
    if "warped" not in values:
        return
    if lists and values["warped"] is None:
        rule = (
            f"repositories write {lists[0]} in two ways: as the final values, or before the shift"
            " moves them towards the noise"
        )
        remedy = "write true for final values, false to have them moved by timestep_shift"
        yield ConfigError("warped", "null", rule, remedy)
    if not lists and values["warped"] is not None:
        rule = "it applies to timesteps or sigmas, and neither is given"
        value = str(values["warped"]).lower()
        yield ConfigError("warped", value, rule, "leave it out, or write the list")
