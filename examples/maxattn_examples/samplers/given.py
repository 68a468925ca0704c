"""Lists of times or sigmas that the settings have in the place of a sampler's own.

Repositories write such lists in two ways: with the final values, or before a shift towards the
noise. [1000, 750, 500, 250] before a shift of 5 is 1000, 937.5, 833.3, 625. `warped` says which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Float

from maxattn.errors import ConfigError

from .betas import Betas
from .euler import known_sigmas
from .flow_euler import shifted

Key = Literal["timesteps", "sigmas"]
KEYS: tuple[Key, Key] = ("timesteps", "sigmas")
SLACK = 1.01  # of a model's largest sigma, which lists often have rounded
WITHOUT = {"unipc": "flow_euler", "ddim": "euler"}  # samplers that take no list, and one that does


@dataclass(frozen=True)
class Given:
    """Hold a list, one value for each step.

    Args:
        key: of the settings.
        values: falling; the clean end, 0, is not among them.
        warped: whether these are the final values; False: a shift moves them first; None: the model
            knows no shift.
    """

    key: Key
    values: tuple[float, ...]
    warped: bool | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self | None:
        """Take the list from settings; None where there is none."""
        for key in KEYS:
            if found := values.get(key):
                warped = values.get("warped")
                ends = found[-1] == _clean(key, values)
                return cls(key, tuple(found[:-1] if ends else found), warped)
        return None

    @property
    def setting(self) -> str:
        """The setting that has the list."""
        return f"sampling.{self.key}"

    def __str__(self) -> str:
        return f"[{', '.join(f'{x:g}' for x in self.values)}]"

    def flow(self, shift: float, train_steps: int) -> Float[np.ndarray, " n+1"]:
        """Return the grid of sigmas for a model of velocities, with 0 at its end.

        Args:
            shift: moves a list that is not warped.
            train_steps: what sigma 1 is called as a time.

        Raises:
            ConfigError: a value is not between noise and clean.
        """
        most = train_steps if self.key == "timesteps" else 1
        if not 0 < self.values[-1] <= self.values[0] <= most:
            rule = f"noise is {most}, and clean is 0, where the last step ends"
            raise ConfigError(self.setting, self, rule, f"write {most} and less, above 0")
        sigmas = np.array(self.values) / most
        return np.append(sigmas if self.warped else shifted(sigmas, shift), 0.0)

    def discrete(self, sampler: str, betas: Betas) -> dict[str, tuple[float, ...]]:
        """Return the argument of a sampler's `schedule` that takes the list.

        Args:
            sampler: euler or lcm.
            betas: the noise that the model knows.

        Raises:
            ConfigError: the sampler or the model does not know these values.
        """
        count = betas.num_train_timesteps
        if self.key == "sigmas":
            return {"sigmas": self._sigmas(sampler, betas)}
        if sampler == "lcm" and any(x % 1 for x in self.values):
            whole = {min(round(x), count - 1) for x in self.values}
            rounded = sorted(whole, reverse=True)
            rule = "lcm takes its steps at the whole times that the model was trained at"
            raise ConfigError(self.setting, self, rule, f"write {rounded}")
        if self.values[0] > count - 1:
            rule = f"the model was trained at times 0 to {count - 1}"
            raise ConfigError(self.setting, self, rule, f"write {count - 1} and less")
        times = self.values if sampler == "euler" else tuple(int(x) for x in self.values)
        return {"times": times}

    def _sigmas(self, sampler: str, betas: Betas) -> tuple[float, ...]:
        if sampler != "euler":
            rule = f"{sampler} is told times, and finds sigmas by them"
            raise ConfigError(self.setting, self, rule, "write sampling.timesteps")
        least, most = known_sigmas(betas)[[0, -1]]
        if self.values[0] > most * SLACK or self.values[-1] * SLACK < least:
            rule = f"the sigmas of the times that the model was trained at are {least:.3g} to"
            remedy = "write sigmas between these; sampling.timesteps are times"
            raise ConfigError(self.setting, self, f"{rule} {most:.4g}", remedy)
        return self.values


def _clean(key: Key, values: Mapping[str, Any]) -> float | None:
    """Return the clean end of a list; a time of 0 is one that a model of discrete times knows."""
    return 0 if key == "sigmas" or "warped" in values else None


def taken_by(sampler: str, given: Given | None) -> Iterator[ConfigError]:
    """Yield that a sampler takes no list."""
    if given is not None and sampler in WITHOUT:
        rule = f"{sampler} takes its steps at times of its own"
        yield ConfigError(given.setting, given, rule, f"set sampling.sampler={WITHOUT[sampler]}")


def list_errors(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield what is wrong with the lists of settings, whatever the model is.

    Args:
        values: of the section `sampling`, all of them.
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
        elif values[key] == (_clean(key, values),):
            rule = "0 is the clean end, where the last step ends, so no step begins there"
            remedy = f"write values above 0 before it, or leave it out for the sampler's own {key}"
            yield ConfigError(key, "[0]", rule, remedy)
    if len(lists) == 2:
        rule = "timesteps and sigmas are two ways to write one list"
        yield ConfigError("sigmas", Given("sigmas", values["sigmas"]), rule, "write one of them")
    yield from _length_errors(values)
    yield from _warped_errors(values, lists)


def unmoved_errors(values: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield a shift of times that a list of final values leaves unused.

    Args:
        values: of the section `sampling`, settled, of no model that has a shift of its own.
    """
    given, shift = Given.of(values), values.get("timestep_shift")
    if given is not None and given.warped and shift is not None:
        by = values["distilled"]
        rule = f"it moves no final values, and {given.key} {given} are final (warped: true)"
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
        rule = "it says how timesteps or sigmas are written, and there is no list"
        value = str(values["warped"]).lower()
        yield ConfigError("warped", value, rule, "leave it out, or write the list")
