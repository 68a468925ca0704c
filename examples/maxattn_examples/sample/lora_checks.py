"""Refuses LoRA weights that are not there or are another family's, and a scale of none."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from flax import nnx

from maxattn import weights
from maxattn.errors import ConfigError, MaxattnError, WeightsError
from maxattn_examples.common.pipeline_folder import NAMES
from maxattn_examples.sample.distilled import named_by

from .paths import Paths
from .task import SamplingTask

LEAVE_OUT = "pass strict=False"  # begins the remedy for weights of which some fit
# How diffusers, the models' own code and kohya's programs name the layers of a family, with
# underscores for dots. The first that fits counts: SDXL's blocks hold blocks named as others' are.
LAYERS = {
    "sdxl": r"(down_blocks|up_blocks|mid_block|input_blocks|output_blocks|middle_block)_",
    "flux": r"((single_transformer|double|single)blocks|transformerblocks_\d+_(attn|ff))_",
    "wan": r"blocks_\d+_(attn1|attn2|self_attn|cross_attn|ffn)_",
}
# One word: Wan's "blocks" may stand behind the name of its part of the pipeline, "transformer".
JOINED = re.compile(r"(single_transformer|double|single|(?<!lora_)transformer)_blocks")


def lora_errors(task: SamplingTask, paths: Paths) -> Iterator[ConfigError]:
    """Yield what cannot be merged into the task's model."""
    given = {"--lora": paths.lora, "--lora-2": paths.lora_2}
    for option, path in given.items():
        if path is not None:
            yield from _file_errors(task, option, path)
    if (scale := paths.lora_scale) is not None and not math.isfinite(scale):
        remedy = "use 1 for the change as it is"
        yield ConfigError("--lora-scale", scale, "it is a finite number", remedy)
    if any(given.values()):
        return
    alone = {
        "--lora-scale": (paths.lora_scale, "multiplies"),
        "--lora-names": (paths.lora_names, "names the layers of"),
        "--lora-lenient": (paths.lora_lenient, "leaves out some"),
    }
    for option, (value, does) in alone.items():
        if value is not None:
            rule = f"it {does} LoRA weights, and none are given"
            yield ConfigError(option, value, rule, "give --lora FILE, or leave it out")


def check_lora(
    task: SamplingTask, model: nnx.Module, option: str, path: Path, paths: Paths
) -> None:
    """Refuse LoRA weights that do not fit the task's model.

    Raises:
        ConfigError: naming the option that gave them.
    """
    names, strict = paths.lora_names, not paths.lora_lenient
    try:
        prefix = weights.lora_prefix(model, path, names)
        weights.check_lora(model, path, prefix=prefix, strict=strict, names=names)
    except WeightsError as error:
        remedy, name = error.remedy, NAMES[task.family]
        if error.setting == "names":
            raise ConfigError("--lora-names", error.value, error.rule, remedy) from None
        if LEAVE_OUT in remedy:
            remedy = remedy.replace("pass strict=False", "give --lora-lenient")
            remedy = remedy.replace("pass the module with these layers", f"weights of this {name}")
        elif family_of(sorted(weights.SafeTensors(path))) is None:
            by = "diffusers, ComfyUI or kohya's programs name them"
            remedy = f"give LoRA weights of {name}, with its layers as {by}"
        elif "prefix=" in remedy:
            remedy = f"give LoRA weights of this very {name} model"
        raise ConfigError(option, f"{path}: {error.value}", error.rule, remedy) from None


def family_of(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the family whose layers are named so, and the first such name; None where none is."""
    for name in names:
        spelt = JOINED.sub(r"\1blocks", name).replace(".", "_")
        for family, layers in LAYERS.items():
            if re.search(f"(^|_){layers}", spelt):
                return family, name
    return None


def _distilled_errors(task: SamplingTask, option: str, path: Path) -> Iterator[ConfigError]:
    """Yield LoRA weights that are named as ones of few steps, and are not sampled so."""
    sampling, row = task.settings.sampling, named_by(path)
    if row is None or row.family != task.family:
        return
    steps, taken = re.search(r"(\d+)-?steps?", path.name.lower()), sampling.num_inference_steps
    if sampling.distilled != row.name:
        rule = f"its name is of {row.of}, and sampling.distilled is {sampling.distilled or 'null'}"
        remedy = f"set sampling.distilled={row.name}, or rename the file if it is another's"
        yield ConfigError(option, path, rule, remedy)
    elif steps is not None and int(steps[1]) != taken:
        rule = f"its name says for how many steps it was distilled, and {taken} are taken"
        yield ConfigError(option, path, rule, f"set sampling.num_inference_steps={steps[1]}")


def _file_errors(task: SamplingTask, option: str, path: Path) -> Iterator[ConfigError]:
    if not path.exists():
        rule = "it names LoRA weights, a file or a folder, and there is none"
        yield ConfigError(option, path, rule, "name a safetensors file")
        return
    try:
        names = sorted(weights.SafeTensors(path))
    except MaxattnError as error:
        yield ConfigError(
            option, error.value, error.rule, "give a safetensors file of LoRA weights"
        )
        return
    family, name = family_of(names) or (task.family, "")
    if family == task.family:
        yield from _distilled_errors(task, option, path)
    else:
        rule = f"its layers are named as those of {NAMES[family]}, and this is {NAMES[task.family]}"
        remedy = f"give LoRA weights of {NAMES[task.family]}, or use examples/generate.py {family}"
        yield ConfigError(option, f"{path}: {name}", rule, remedy)
