"""A sampler by name, with options of diffusers' schedulers, or with a list of times or sigmas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import numpy as np
from jaxtyping import Float

from maxattn.errors import ConfigError

from . import flow
from .discrete import Betas, ddim, euler, known_sigmas, lcm
from .schedule import Schedule

Family = Literal["flow", "even_flow", "discrete"]
CLASSES = {
    "flow_euler": "FlowMatchEulerDiscreteScheduler", "unipc": "UniPCMultistepScheduler",
    "euler": "EulerDiscreteScheduler", "ddim": "DDIMScheduler",
    "flow_lcm": "FlowMatchLCMScheduler", "lcm": "LCMScheduler",
}  # fmt: skip
RENOISING = ("flow_lcm", "lcm")  # the others are deterministic
SHOWN = (
    *("flow_shift", "shift", "solver_order", "prediction_type"),
    *("timestep_spacing", "rescale_betas_zero_snr"),
)
Key = Literal["timesteps", "sigmas"]
KEYS: tuple[Key, Key] = ("timesteps", "sigmas")
SLACK = 1.01  # of a model's largest sigma, which lists often have rounded


@dataclass(frozen=True)
class Sampler:
    """A sampler with checked options.

    Args:
        name: a key of `CLASSES`.
        options: all options of diffusers' class.
        said_by: the file that they were read from.
        family: of the model.
        tokens: of a sample, if the shift depends on its size.
        given: times or sigmas that replace the sampler's own.
        scales_noise: whether the first sample is noise times the first sigma of `given`.
    """

    name: str
    options: Mapping[str, Any]
    said_by: str
    family: Family = "flow"
    tokens: int = 0
    given: Given | None = None
    scales_noise: bool = False

    @property
    def renoises(self) -> bool:
        """Whether each step mixes in new noise."""
        return self.name in RENOISING

    def of_tokens(self, tokens: int) -> Self:
        """Return the sampler for samples of `tokens`."""
        return replace(self, tokens=tokens)

    def schedule(self, steps: int) -> Schedule:
        """Make the schedule of `steps`.

        Raises:
            ConfigError: the model has fewer times than steps.
        """
        o, most = self.options, self.options["num_train_timesteps"]
        if self.family != "discrete":
            return self._flow(steps, most)
        if steps > most:
            rule = f"the model was trained at {most} times, and no time is used twice"
            raise ConfigError("sampling.num_inference_steps", steps, rule, f"use at most {most}")
        betas = Betas(**{key: o[key] for key in Betas.__dataclass_fields__})
        if self.name == "ddim":
            return ddim(steps, betas, set_alpha_to_one=o["set_alpha_to_one"])
        how: dict[str, Any] = {} if self.given is None else self.given.discrete(self.name, betas)
        if self.name == "euler":
            return euler(steps, betas, **how)
        how |= {key: o[key] for key in ("original_inference_steps", "timestep_scaling")}
        if self.given is None and steps > (known := how["original_inference_steps"]):
            rule = f"lcm chooses among the {known} times of original_inference_steps"
            remedy = f"use at most {known}, or write sampling.timesteps"
            raise ConfigError("sampling.num_inference_steps", steps, rule, remedy)
        return lcm(steps, betas, **how)

    def _flow(self, steps: int, most: int) -> Schedule:
        """Make the schedule for a model that predicts velocities."""
        o = self.options
        if self.name == "unipc":
            how: dict[str, Any] = {"order": o["solver_order"], "train_steps": most}
            return flow.unipc(
                steps, o["flow_shift"], uncorrected=tuple(o["disable_corrector"]), **how
            )
        by_size = self.family == "even_flow"
        shift = flow.shift_of(o, self.tokens) if by_size else o["shift"]
        if self.given is not None:
            sigmas = self.given.flow(shift, most)
        else:
            grid = flow.even_sigmas if by_size else flow.usual_sigmas
            sigmas = grid(steps, shift, most)
        if self.name == "flow_euler":
            return flow.euler_over(sigmas, train_steps=most)
        scale = float(sigmas[0]) if self.scales_noise else 1.0
        return flow.lcm_over(sigmas, train_steps=most, noise_scale=scale)

    def __str__(self) -> str:
        options = dict(self.options)
        if options.get("use_dynamic_shifting"):
            shift = flow.shift_of(options, self.tokens)
            options["shift"] = f"{shift:.3g} by {self.tokens} tokens"
        shown = [f"{key} {options[key]}" for key in SHOWN if key in options]
        if self.given is not None or self.name == "lcm":
            shown = [text for text in shown if not text.startswith("timestep_spacing")]
        if self.given is not None:
            shown = [x for x in shown if not (self.given.warped and x.startswith("shift"))]
            times = self.schedule(len(self.given.values)).times
            shown.append(f"times {' '.join(f'{t:.4g}' for t in times)}")
        if self.scales_noise and self.given is not None:
            shown.append(f"first noise times {times[0] / self.options['num_train_timesteps']:.4g}")
        kind = ["re-noising"] if self.renoises else []
        return f"{', '.join([self.name, *kind, *shown])} ({self.said_by})"


@dataclass(frozen=True)
class Given:
    """A list of times or sigmas in the settings, which replaces a sampler's own.

    Repositories write such lists with final values, or before a shift towards the noise. For
    example,
    [1000, 750, 500, 250] before a shift of 5 is 1000, 937.5, 833.3, 625.

    Args:
        values: descending, without the final 0.
        warped: True if these are the final values; False if a shift is applied to them; None if the
            model has no shift.
    """

    key: Key
    values: tuple[float, ...]
    warped: bool | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self | None:
        """Return the list in the settings, or None."""
        for key in KEYS:
            if found := values.get(key):
                warped = values.get("warped")
                ends = found[-1] == clean_end(key, values)
                return cls(key, tuple(found[:-1] if ends else found), warped)
        return None

    @property
    def setting(self) -> str:
        """The dotted name of the setting."""
        return f"sampling.{self.key}"

    def __str__(self) -> str:
        return f"[{', '.join(f'{x:g}' for x in self.values)}]"

    def flow(self, shift: float, train_steps: int) -> Float[np.ndarray, " n+1"]:
        """Return the sigmas for a model that predicts velocities, with a final 0.

        Args:
            shift: applied to a list with warped=False.
            train_steps: the model's time at sigma 1.

        Raises:
            ConfigError: a value is outside of the range from noise to clean.
        """
        most = train_steps if self.key == "timesteps" else 1
        if not 0 < self.values[-1] <= self.values[0] <= most:
            rule = f"noise is {most}, and clean is 0, where the last step ends"
            raise ConfigError(self.setting, self, rule, f"write {most} and less, above 0")
        sigmas = np.array(self.values) / most
        return np.append(sigmas if self.warped else flow.shifted(sigmas, shift), 0.0)

    def discrete(self, sampler: str, betas: Betas) -> dict[str, tuple[float, ...]]:
        """Return the list as an argument of the sampler's `schedule`.

        Args:
            sampler: euler or lcm.
            betas: the noise levels of the model's training.

        Raises:
            ConfigError: the sampler or the model does not have these values.
        """
        count = betas.num_train_timesteps
        if self.key == "sigmas":
            return {"sigmas": self._sigmas(sampler, betas)}
        if sampler == "lcm" and any(x % 1 for x in self.values):
            whole = {min(round(x), count - 1) for x in self.values}
            rounded = sorted(whole, reverse=True)
            rule = "lcm needs integer timesteps"
            raise ConfigError(self.setting, self, rule, f"write {rounded}")
        if self.values[0] > count - 1:
            rule = f"the model was trained at times 0 to {count - 1}"
            raise ConfigError(self.setting, self, rule, f"write {count - 1} and less")
        times = self.values if sampler == "euler" else tuple(int(x) for x in self.values)
        return {"times": times}

    def _sigmas(self, sampler: str, betas: Betas) -> tuple[float, ...]:
        if sampler != "euler":
            rule = f"{sampler} needs times, and computes sigmas from them"
            raise ConfigError(self.setting, self, rule, "write sampling.timesteps")
        least, most = known_sigmas(betas)[[0, -1]]
        if self.values[0] > most * SLACK or self.values[-1] * SLACK < least:
            rule = f"the sigmas of the times that the model was trained at are {least:.3g} to"
            remedy = "write sigmas between these; sampling.timesteps are times"
            raise ConfigError(self.setting, self, f"{rule} {most:.4g}", remedy)
        return self.values


def clean_end(key: Key, values: Mapping[str, Any]) -> float | None:
    """Return the value at the clean end of a list; None for discrete times, which include 0."""
    return 0 if key == "sigmas" or "warped" in values else None
