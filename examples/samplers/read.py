"""Which sampler a model's folder asks for: diffusers' `scheduler_config.json`, read strictly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self

from common.json_file import read_mapping

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, did_you_mean

from . import ddim, euler, flow_euler, unipc
from .betas import Betas
from .options import BY_SIZE, KNOWN, OPTIONS
from .schedule import Schedule

Family = Literal["flow", "even_flow", "discrete"]
CLASSES = {
    "flow_euler": "FlowMatchEulerDiscreteScheduler", "unipc": "UniPCMultistepScheduler",
    "euler": "EulerDiscreteScheduler", "ddim": "DDIMScheduler",
}  # fmt: skip
NAMES = {name: short for short, name in CLASSES.items()}
FAMILIES: Mapping[Family, tuple[str, ...]] = {
    "flow": ("unipc", "flow_euler"),
    "even_flow": ("flow_euler",),
    "discrete": ("euler", "ddim"),
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
        name: flow_euler, unipc, euler or ddim.
        options: of diffusers' class, all of them.
        said_by: where they were read.
        family: of the model.
        tokens: of a sample, where its size says how times are shifted.
    """

    name: str
    options: Mapping[str, Any]
    said_by: str
    family: Family = "flow"
    tokens: int = 0

    def of_tokens(self, tokens: int) -> Self:
        """Return the sampler of samples with so many tokens."""
        return replace(self, tokens=tokens)

    def schedule(self, steps: int) -> Schedule:
        """Make the schedule of so many steps.

        Raises:
            ConfigError: more steps than the model has times.
        """
        o, most = self.options, self.options["num_train_timesteps"]
        if steps > most and self.name in FAMILIES["discrete"]:
            rule = f"the model was trained at {most} times, and no time is used twice"
            raise ConfigError("sampling.num_inference_steps", steps, rule, f"use at most {most}")
        if self.family == "even_flow":
            shift = flow_euler.shift_of(o, self.tokens)
            return flow_euler.even(steps, shift, train_steps=most)
        if self.name == "flow_euler":
            return flow_euler.schedule(steps, o["shift"], train_steps=most)
        if self.name == "unipc":
            how: dict[str, Any] = {"order": o["solver_order"], "train_steps": most}
            skipped = tuple(o["disable_corrector"])
            return unipc.schedule(steps, o["flow_shift"], uncorrected=skipped, **how)
        betas = Betas(**{key: o[key] for key in Betas.__dataclass_fields__})
        if self.name == "euler":
            return euler.schedule(steps, betas)
        return ddim.schedule(steps, betas, set_alpha_to_one=o["set_alpha_to_one"])

    def __str__(self) -> str:
        options = dict(self.options)
        if options.get("use_dynamic_shifting"):
            shift = flow_euler.shift_of(options, self.tokens)
            options["shift"] = f"{shift:.3g} by {self.tokens} tokens"
        shown = (f"{key} {options[key]}" for key in SHOWN if key in options)
        return f"{self.name}, {', '.join(shown)} ({self.said_by})"


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
    problems += _contradictions(options, str(path))
    if problems:
        raise ConfigErrors(problems)
    said_by = f"{path.parent.name}/{path.name}" if there else NO_FILE
    return Sampler(name, options, said_by, family)


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
    by_size = BY_SIZE[kind] if family == "even_flow" else {}
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
    remedy = f"write {key} as {wanted} there, or set sampling.sampler"
    return ConfigError(f"{where}: {key}", repr(value), rule, remedy)


def _contradictions(options: Mapping[str, Any], where: str) -> list[ConfigError]:
    if options.get("use_dynamic_shifting") and "base_shift" in options:
        least, most = options["base_image_seq_len"], options["max_image_seq_len"]
        rule = f"the shift grows from base_image_seq_len, {least}, to it"
        setting, remedy = f"{where}: max_image_seq_len", f"write more than {least}, such as 4096"
        return [] if most > least else [ConfigError(setting, most, rule, remedy)]
    is_ddim = "set_alpha_to_one" in options
    if not is_ddim or not options["rescale_betas_zero_snr"]:
        return []
    if options["prediction_type"] != "epsilon":
        return []
    rule = "where nothing is left of the sample, DDIM cannot find it from the noise alone (0 / 0)"
    setting, remedy = f"{where}: rescale_betas_zero_snr", "set sampling.sampler=euler"
    return [ConfigError(setting, True, rule, remedy)]
