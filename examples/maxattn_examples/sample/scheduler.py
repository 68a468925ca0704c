"""Choose the sampler from diffusers' `scheduler_config.json`, and refuse unsupported options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, did_you_mean
from maxattn_examples.common.pipeline_folder import read_mapping
from maxattn_examples.samplers.discrete import Betas
from maxattn_examples.samplers.sampler import CLASSES, Family, Given, Sampler

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
WITHOUT = {"unipc": "flow_euler", "ddim": "euler"}  # samplers that take no list, and one that does


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
        folder: with `scheduler/scheduler_config.json`. If it is None or lacks the file, the usual
            sampler of Wan 2.1 at 480p, FLUX.1-dev or SDXL.
        family: of the supported samplers: "flow" for Wan, "even_flow" for Flux, "discrete" for
            SDXL.
        sampler: overrides the file's; options that both have come from the file.
        flow_shift: overrides the file's.
        prediction_type: of the model, if no file gives it.
        given: times or sigmas that replace the sampler's own.
        replaced: options that override the file's.
        scales_noise: as for `Sampler`.

    Raises:
        ConfigErrors: all options that are unknown or not supported.
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
    problems += _contradictions(options, str(path))
    if given is not None and name in WITHOUT:
        rule = f"{name} has times of its own, and takes no list"
        remedy = f"set sampling.sampler={WITHOUT[name]}"
        problems.append(ConfigError(given.setting, given, rule, remedy))
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
    """Return the options of a class, from the file or by default, and the errors in them.

    Args:
        said: the content of the file.
        of: the model's family, and diffusers' class.
        where: the file's name.
        other: whether the file is for another class; the supported values then are the defaults.
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
            rule = "this option is not supported, and may change the numbers"
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


# ---- options -------------------------------------------------------------------------------------


class Option(NamedTuple):
    """An option of diffusers' schedulers.

    Args:
        default: diffusers' default.
        supported: the supported values; empty if all numbers are.
    """

    default: Any
    supported: tuple[Any, ...] = ()


OFF, UNSET = Option(False, (False,)), Option(None, (None,))
BOTH = (False, True)
SPACINGS = ("leading", "trailing", "linspace")
NO_OTHER_SIGMAS = {"use_karras_sigmas": OFF, "use_exponential_sigmas": OFF, "use_beta_sigmas": OFF}
FLOW = NO_OTHER_SIGMAS | {
    "num_train_timesteps": Option(1000), "shift": Option(1.0), "use_dynamic_shifting": OFF,
    "invert_sigmas": OFF, "shift_terminal": UNSET,
}  # fmt: skip
DISCRETE = {
    "num_train_timesteps": Option(1000), "beta_start": Option(0.0001), "beta_end": Option(0.02),
    "beta_schedule": Option("linear", ("linear", "scaled_linear")), "trained_betas": UNSET,
    "prediction_type": Option("epsilon", ("epsilon", "v_prediction")), "steps_offset": Option(0),
    "rescale_betas_zero_snr": Option(False, BOTH),
}  # fmt: skip
# By diffusers' class: every option that changes its numbers.
OPTIONS: Mapping[str, Mapping[str, Option]] = {
    "FlowMatchEulerDiscreteScheduler": FLOW | {"stochastic_sampling": OFF},
    "FlowMatchLCMScheduler": FLOW | {"scale_factors": UNSET},
    "UniPCMultistepScheduler": NO_OTHER_SIGMAS | {
        "num_train_timesteps": Option(1000), "flow_shift": Option(1.0),
        "solver_order": Option(2, (1, 2, 3)), "solver_type": Option("bh2", ("bh2",)),
        "disable_corrector": Option([]), "solver_p": UNSET,
        "prediction_type": Option("epsilon", ("flow_prediction",)),
        "use_flow_sigmas": Option(False, (True,)), "predict_x0": Option(True, (True,)),
        "lower_order_final": Option(True, (True,)), "thresholding": OFF,
        "final_sigmas_type": Option("zero", ("zero",)), "use_dynamic_shifting": OFF,
        "shift_terminal": UNSET,
    },
    "EulerDiscreteScheduler": NO_OTHER_SIGMAS | DISCRETE | {
        "timestep_spacing": Option("linspace", SPACINGS), "sigma_min": UNSET, "sigma_max": UNSET,
        "interpolation_type": Option("linear", ("linear",)),
        "timestep_type": Option("discrete", ("discrete",)),
        "final_sigmas_type": Option("zero", ("zero",)),
    },
    "DDIMScheduler": DISCRETE | {
        "timestep_spacing": Option("leading", SPACINGS), "set_alpha_to_one": Option(True, BOTH),
        "clip_sample": Option(True, (False,)), "thresholding": OFF,
    },
    "LCMScheduler": DISCRETE | {
        "beta_start": Option(0.00085), "beta_end": Option(0.012),
        "beta_schedule": Option("scaled_linear", ("scaled_linear", "linear")),
        "timestep_spacing": Option("leading", SPACINGS), "timestep_scaling": Option(10.0),
        "original_inference_steps": Option(50), "clip_sample": OFF, "thresholding": OFF,
    },
}  # fmt: skip
# What a pipeline that knows the size of the sample adds to its scheduler.
BY_SIZE: Mapping[str, Option] = {
    "use_dynamic_shifting": Option(False, BOTH), "base_shift": Option(0.5),
    "max_shift": Option(1.15), "base_image_seq_len": Option(256),
    "max_image_seq_len": Option(4096),
    "time_shift_type": Option("exponential", ("exponential", "linear")),
}  # fmt: skip
# Options that change nothing: they belong to what is not supported, or files have them from other
# classes.
UNREAD = {
    "base_shift", "max_shift", "base_image_seq_len", "max_image_seq_len", "time_shift_type",
    "clip_sample_range", "dynamic_thresholding_ratio", "sample_max_value", "skip_prk_steps",
    "variance_type", "upscale_mode", "algorithm_type", "euler_at_final", "use_lu_lambdas",
    "lambda_min_clipped",
}  # fmt: skip
KNOWN = UNREAD.union(*OPTIONS.values())
