"""The family of models that a command runs: named before the file, or by the file itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import NAMES, PIPELINES, Family, index_of

FAMILIES: tuple[Family, ...] = get_args(Family)
SIZES: dict[str, Family] = {"wan": "wan", "flux": "flux"}  # how names of sizes begin
# Keys of the section `model` that one family alone has.
KEYS: dict[str, Family] = {"prediction_type": "sdxl"}

TEXT, TEXT_2 = ("tokenizer", "text_encoder"), ("tokenizer_2", "text_encoder_2")
ENCODERS = {
    "WanPipeline": TEXT,
    "WanImageToVideoPipeline": (*TEXT, "image_encoder", "image_processor", "vae"),
    "StableDiffusionXLPipeline": (*TEXT, *TEXT_2),
    "FluxPipeline": (*TEXT, *TEXT_2),
}
"""The parts of a pipeline that encode its prompts and images."""
ALL = "Wan, SDXL or Flux.1"  # in the first line of a command's help
EXAMPLE = re.compile(r"(?:    # .*\n)*    python examples/\w+\.py (\w+) (?:.*\\\n)*.*\n")


def named(arguments: Sequence[str] | None = None) -> tuple[Family | None, list[str]]:
    """Split a command line into the family that it may begin with, and the rest.

    Args:
        arguments: default those of the process.

    Returns:
        The family or None, and the other arguments.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    for family in FAMILIES:
        if words[:1] == [family]:
            return family, words[1:]
    return None, words


def of_file(path: str, overrides: Sequence[str] = ()) -> Family:
    """Return the family of a YAML file, by its section `model`.

    Args:
        overrides: `key=value`, which may name other sizes.

    Raises:
        ConfigError: the section names no family's sizes.
    """
    try:
        sections = yaml.safe_load(Path(path).read_text("utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError):
        return "wan"  # its settings class reports the error
    model = sections.get("model") if isinstance(sections, dict) else None
    model = dict(model) if isinstance(model, dict) else {}
    for key, value in (override.split("=", 1) for override in overrides if "=" in override):
        if key.strip() in ("sizes", "model.sizes") and value.strip() != "null":
            model["sizes"] = value
    prefix = str(model.get("sizes")).partition("-")[0].partition(".")[0]
    found = [SIZES.get(prefix), *(family for key, family in KEYS.items() if key in model)]
    if family := next(filter(None, found), None):
        return family
    rule = "its section model names no sizes, so it does not say which models it is for"
    raise ConfigError("config", path, rule, f"write {' or '.join(FAMILIES)} before the file")


def help_of(description: str, family: Family | None) -> str:
    """Return a command's help with the name and the examples of one family only.

    Args:
        description: the help of the command, which writes `ALL` where a family's name goes.
        family: None keeps all families.
    """
    if family is None:
        return description
    own = description.replace(ALL, NAMES[family])
    return EXAMPLE.sub(lambda found: found[0] if found[1] == family else "", own)


def settings_class(family: Family) -> Any:
    """Return the settings class of a family, or for Wan a function that chooses one."""
    if family == "flux":
        from maxattn_examples.flux.settings import Settings as Flux

        return Flux
    if family == "sdxl":
        from maxattn_examples.sdxl.settings import Settings as Sdxl

        return Sdxl
    return wan_settings_class


def wan_settings_class(path: str, overrides: Sequence[str]) -> type:
    """Choose the settings class for a file: Wan's, or that of digits, which share Wan's network."""
    from maxattn_examples.digits.settings import Settings as Clips
    from maxattn_examples.digits.settings import describes_clips
    from maxattn_examples.wan.settings import Settings as Wan

    return Clips if describes_clips(path, overrides) else Wan


def sampling_task(settings: Any) -> Callable[[Any, Path], Any]:
    """Return a function that makes the sampling task from settings and a model's folder."""
    if (family := settings.sampling.family) == "flux":
        from maxattn_examples.flux.sampling import FluxSamplingTask

        return FluxSamplingTask.of
    if family == "sdxl":
        from maxattn_examples.sdxl.sampling import SdxlSamplingTask

        return SdxlSamplingTask.of
    from maxattn_examples.digits.settings import Settings as Clips
    from maxattn_examples.digits.task import ClipSamplingTask
    from maxattn_examples.wan.sampling import WanSamplingTask

    return (ClipSamplingTask if isinstance(settings, Clips) else WanSamplingTask).of


def encode(
    folder: Path, prompts: Sequence[str], negative: str | None, tokens: int, device: str
) -> dict[str, Any]:
    """Encode a batch of prompts, and a negative one, with a pipeline's encoders.

    Args:
        folder: a pipeline's, whose `model_index.json` names its family.
        negative: None is the empty prompt, or for SDXL as its folder says.
        tokens: length of a text; SDXL uses its tokenizers' instead.
        device: cpu or cuda.
    """
    kind = index_of(folder)["_class_name"]
    if kind in PIPELINES["sdxl"]:
        from maxattn_examples.sdxl import sampling as sdxl

        return sdxl.encode(folder, prompts, negative, device)
    if kind in PIPELINES["flux"]:
        from maxattn_examples.flux import sampling as flux

        return flux.encode(folder, prompts, negative, tokens, device)
    from maxattn_examples.wan import torch_parts

    told = {"text": prompts, "negative_text": [negative or ""]}
    return torch_parts.texts(folder, told, tokens, device)


def training_task(settings: Any) -> Any:
    """Return the training task of settings, a `maxattn_examples.train.task.Task`."""
    if (family := settings.sampling.family) == "flux":
        from maxattn_examples.flux.task import FluxTask

        return FluxTask.of(settings)
    if family == "sdxl":
        from maxattn_examples.sdxl.task import SdxlTask

        return SdxlTask.of(settings)
    from maxattn_examples.digits.settings import Settings as Clips
    from maxattn_examples.digits.task import ClipTask, DistilTask
    from maxattn_examples.wan.task import WanTask

    if isinstance(settings, Clips):
        return (ClipTask if settings.training.distil is None else DistilTask).of(settings)
    return WanTask.of(settings)
