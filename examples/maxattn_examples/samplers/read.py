"""Which sampler a model's folder asks for: diffusers' `scheduler_config.json`, read strictly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, did_you_mean
from maxattn_examples.common.json_file import read_mapping

from . import ddim, euler, flow_euler, flow_lcm, lcm, unipc
from .betas import Betas
from .given import Given, taken_by
from .options import BY_SIZE, KNOWN, OPTIONS
from .schedule import Schedule

Family = Literal["flow", "even_flow", "discrete"]
CLASSES = {
    "flow_euler": "FlowMatchEulerDiscreteScheduler", "unipc": "UniPCMultistepScheduler",
    "euler": "EulerDiscreteScheduler", "ddim": "DDIMScheduler",
    "flow_lcm": "FlowMatchLCMScheduler", "lcm": "LCMScheduler",
}  # fmt: skip
RENOISING = ("flow_lcm", "lcm")  # the others are deterministic
NAMES = {name: short for short, name in CLASSES.items()}
FAMILIES: Mapping[Family, tuple[str, ...]] = {
    "flow": ("unipc", "flow_euler", "flow_lcm"),
    "even_flow": ("flow_euler", "flow_lcm"),
    "discrete": ("euler", "ddim", "lcm"),
}
# One option under the names of two classes.
SAME = {"shift": "flow_shift", "flow_shift": "shift"}
NO_FILE = "no scheduler_config.json: as such models are usually sampled"
USUAL: Mapping[Family, Mapping[str, Any]] = {
    "flow": {
        "_class_name": CLASSES["unipc"], "flow_shift": 3.0, "use_flow_sigmas": True,
        "prediction_type": "flow_prediction",
    },
    "even_flow": {"_class_name": CLASSES["flow_euler"], "shift": 3.0, "use_dynamic_shifting": True},
    "discrete": {**vars(Betas()), "_class_name": CLASSES["euler"], "set_alpha_to_one": False},
}  # fmt: skip
MODELS = {
    "flow": "a Wan model predicts velocities",
    "even_flow": "a Flux model predicts velocities, at sigmas that its pipeline gives",
    "discrete": "an SDXL model knows a thousand discrete times",
}


@dataclass(frozen=True)
class Sampler:
    """Hold a sampler and its options, checked.

    Args:
        name: of `CLASSES`.
        options: of diffusers' class, all of them.
        said_by: where they were read.
        family: of the model.
        tokens: of a sample, where its size says how times are shifted.
        given: times or sigmas in the place of the sampler's own.
        scales_noise: whether the first sample of a list of sigmas is noise times the first of them.
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
        """Return the sampler of samples with so many tokens."""
        return replace(self, tokens=tokens)

    def schedule(self, steps: int) -> Schedule:
        """Make the schedule of so many steps.

        Raises:
            ConfigError: more steps than the model has times.
        """
        o, most = self.options, self.options["num_train_timesteps"]
        if self.family != "discrete":
            return self._flow(steps, most)
        if steps > most:
            rule = f"the model was trained at {most} times, and no time is used twice"
            raise ConfigError("sampling.num_inference_steps", steps, rule, f"use at most {most}")
        betas = Betas(**{key: o[key] for key in Betas.__dataclass_fields__})
        if self.name == "ddim":
            return ddim.schedule(steps, betas, set_alpha_to_one=o["set_alpha_to_one"])
        how: dict[str, Any] = {} if self.given is None else self.given.discrete(self.name, betas)
        if self.name == "euler":
            return euler.schedule(steps, betas, **how)
        how |= {key: o[key] for key in ("original_inference_steps", "timestep_scaling")}
        if self.given is None and steps > (known := how["original_inference_steps"]):
            rule = f"lcm chooses among the {known} times of original_inference_steps"
            remedy = f"use at most {known}, or write sampling.timesteps"
            raise ConfigError("sampling.num_inference_steps", steps, rule, remedy)
        return lcm.schedule(steps, betas, **how)

    def _flow(self, steps: int, most: int) -> Schedule:
        """Make the schedule of a model that predicts velocities."""
        o = self.options
        if self.name == "unipc":
            how: dict[str, Any] = {"order": o["solver_order"], "train_steps": most}
            return unipc.schedule(
                steps, o["flow_shift"], uncorrected=tuple(o["disable_corrector"]), **how
            )
        by_size = self.family == "even_flow"
        shift = flow_euler.shift_of(o, self.tokens) if by_size else o["shift"]
        if self.given is not None:
            sigmas = self.given.flow(shift, most)
        else:
            grid = flow_euler.even_sigmas if by_size else flow_euler.usual_sigmas
            sigmas = grid(steps, shift, most)
        if self.name == "flow_euler":
            return flow_euler.over(sigmas, train_steps=most)
        scale = float(sigmas[0]) if self.scales_noise else 1.0
        return flow_lcm.over(sigmas, train_steps=most, noise_scale=scale)

    def __str__(self) -> str:
        options = dict(self.options)
        if options.get("use_dynamic_shifting"):
            shift = flow_euler.shift_of(options, self.tokens)
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


SHOWN = (
    "flow_shift",
    "shift",
    "solver_order",
    "prediction_type",
    "timestep_spacing",
    "rescale_betas_zero_snr",
)


def read(
    folder: str | Path | None,
    family: Family,
    sampler: str | None = None,
    flow_shift: float | None = None,
    prediction_type: str | None = None,
    *,
    given: Given | None = None,
    replaced: Mapping[str, Any] = MappingProxyType({}),
    scales_noise: bool = False,
) -> Sampler:
    """Read the sampler of a pipeline's folder.

    Args:
        folder: with `scheduler/scheduler_config.json`; None, or without it: what Wan 2.1 at 480p,
            FLUX.1-dev and SDXL are usually sampled with.
        family: what the model can be sampled with: "flow" for Wan, "even_flow" for Flux, "discrete"
            for SDXL.
        sampler: another one than the file's, with the file's options where both have them.
        flow_shift: another one than the file's.
        prediction_type: what the model predicts, where no file says it.
        given: times or sigmas in the place of the sampler's own.
        replaced: options that are not taken from the file.
        scales_noise: as of `Sampler`.

    Raises:
        ConfigErrors: everything that is unknown or not supported, at once.
    """
    path = Path(folder or "") / "scheduler" / "scheduler_config.json"
    there = folder is not None and path.is_file()
    said: Mapping[str, Any] = read_mapping(path) if there else USUAL[family]
    if not there and prediction_type is not None:
        said = {**said, "prediction_type": prediction_type}
    kind = said.get("_class_name", "")
    name = sampler or NAMES.get(kind, "")
    if name not in FAMILIES[family]:
        raise _wrong_family(path, family, sampler, kind)
    other = sampler is not None and CLASSES[name] != kind
    options, problems = _options(said, (family, CLASSES[name]), str(path), other)
    if flow_shift is not None:
        options |= {key: flow_shift for key in SAME if key in options}
        options |= {"use_dynamic_shifting": False} if "use_dynamic_shifting" in options else {}
    options |= replaced
    problems += [*_contradictions(options, str(path)), *taken_by(name, given)]
    if problems:
        raise ConfigErrors(problems)
    said_by = f"{path.parent.name}/{path.name}" if there else NO_FILE
    return Sampler(name, options, said_by, family, given=given, scales_noise=scales_noise)


def _wrong_family(path: Path, family: Family, sampler: str | None, kind: str) -> ConfigError:
    known = FAMILIES[family]
    named = ", ".join(f"{short} ({CLASSES[short]})" for short in known)
    rule = f"{MODELS[family]}: it is sampled with {named}"
    remedy = f"set sampling.sampler={known[0]}"
    if sampler:
        hint = did_you_mean(sampler, known)
        return ConfigError("sampling.sampler", sampler, rule, hint or remedy)
    return ConfigError(f"{path}: _class_name", kind or "(none)", rule, remedy)


def _options(
    said: Mapping[str, Any], of: tuple[Family, str], where: str, other: bool
) -> tuple[dict[str, Any], list[ConfigError]]:
    """Return the options of a class, from the file or by default, and what is wrong with them.

    Args:
        said: the file.
        of: the model's family, and diffusers' class.
        where: the file's name.
        other: the file is about another class: what it does not say is then what is supported.
    """
    (family, kind), found, problems = of, {}, [*_unknown(said, where)]
    by_size = BY_SIZE if family == "even_flow" else {}
    for key, option in {**OPTIONS[kind], **by_size}.items():
        spelt = key if key in said or SAME.get(key) not in said else SAME[key]
        default = option.supported[0] if other and option.supported else option.default
        found[key] = value = said.get(spelt, default)
        if (option.supported and value not in option.supported) or not _same_type(value, option):
            problems.append(_unsupported(where, key, value, option, kind, key in said))
    return found, problems


def _same_type(value: Any, option: Any) -> bool:
    if option.supported:
        return True
    if isinstance(option.default, list):
        return isinstance(value, list) and all(type(x) is int for x in value)
    return type(value) is int or (type(value) is float and type(option.default) is float)


def _unknown(said: Mapping[str, Any], where: str) -> Iterator[ConfigError]:
    for key, value in said.items():
        if not key.startswith("_") and key not in KNOWN:
            rule = "no sampler here knows this option, and it may change the numbers"
            remedy = did_you_mean(key, KNOWN) or "remove it from the file"
            yield ConfigError(f"{where}: {key}", value, rule, remedy)


def _unsupported(
    where: str, key: str, value: Any, option: Any, kind: str, said: bool
) -> ConfigError:
    wanted = " or ".join(map(repr, option.supported)) or f"a number like {option.default!r}"
    by = "" if said else ", its default where the file does not say"
    rule = f"{kind} is supported with {wanted}{by}"
    other = "=flow_lcm, which re-noises" if key == "stochastic_sampling" else ""
    remedy = f"write {key} as {wanted} there, or set sampling.sampler{other}"
    return ConfigError(f"{where}: {key}", repr(value), rule, remedy)


def _contradictions(options: Mapping[str, Any], where: str) -> list[ConfigError]:
    if options.get("use_dynamic_shifting") and "base_shift" in options:
        least, most = options["base_image_seq_len"], options["max_image_seq_len"]
        rule = f"the shift grows from base_image_seq_len, {least}, to it"
        setting, remedy = f"{where}: max_image_seq_len", f"write more than {least}, such as 4096"
        return [] if most > least else [ConfigError(setting, most, rule, remedy)]
    divides = {"set_alpha_to_one": "DDIM", "timestep_scaling": "LCM"}
    name = next((named for key, named in divides.items() if key in options), None)
    if name is None or not options["rescale_betas_zero_snr"]:
        return []
    if options["prediction_type"] != "epsilon":
        return []
    rule = (
        f"where nothing is left of the sample, {name} cannot find it from the noise alone (0 / 0)"
    )
    setting, remedy = f"{where}: rescale_betas_zero_snr", "set sampling.sampler=euler"
    return [ConfigError(setting, True, rule, remedy)]
