"""Read and check the weights of a run, LoRA weights too."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
from flax import nnx

from maxattn import weights
from maxattn.errors import ConfigError, MaxattnError, WeightsError
from maxattn_examples.common.pipeline_folder import (
    FIRST,
    NAMES,
    SECOND,
    boundary_of,
    class_error,
    config_of,
    index_of,
    lacking,
    part_of,
    whole_errors,
)

from .distilled import named_by
from .inputs import Paths
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


def check_weights(task: SamplingTask, paths: Paths) -> None:
    """Refuse weights of another model before prompts are encoded, which can take minutes.

    All transformers and LoRA weights are checked.

    Raises:
        ConfigError: names, shapes or dtypes differ.
    """
    model = nnx.eval_shape(lambda: task.build(None, nnx.Rngs(0)))
    for part in parts_of(task, paths):
        _check_part(model, paths, part)
    for option, lora in (("--lora", paths.lora), ("--lora-2", paths.lora_2)):
        if lora is not None:
            _check_lora(task, model, option, lora, paths)


def _check_part(model: nnx.Module, paths: Paths, part: str) -> None:
    path = paths.weights_of(part)
    try:
        weights.check_diffusers(model, path)
    except WeightsError as error:
        setting = "model.folder" if paths.weights is None else "--weights"
        remedy = error.remedy
        if "strict=" in remedy:
            remedy = "give weights of these sizes, or fetch the folder again: config.json has them"
        value = error.value if error.value == path else f"{path}: {error.value}"
        raise ConfigError(setting, value, error.rule, remedy) from None


def load(
    task: SamplingTask, paths: Paths, mesh: jax.sharding.Mesh | None, part: str = ""
) -> nnx.Module:
    """Build the model and read its weights directly onto the mesh; merge LoRA weights, if any.

    Args:

        part: of the pipeline's folder; default the task's.
    """
    began = time.perf_counter()
    model = nnx.eval_shape(lambda: task.build(mesh, nnx.Rngs(0)))
    lora = paths.lora_of(part or task.part)
    names = paths.lora_names
    prefix = weights.lora_prefix(model, lora, names) if lora else ""
    weights.load_diffusers(model, paths.weights_of(part or task.part), mesh=mesh)
    count = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    print(f"{count / 1e6:,.1f} million parameters read in {time.perf_counter() - began:.1f} s")
    if lora is not None:
        scale = lora_scale(task, paths)
        how = {"prefix": prefix, "strict": not paths.lora_lenient, "names": names}
        changed = weights.merge_lora(model, lora, scale, **how)
        others = _passed_over(lora, prefix)
        print(f"LoRA weights of {len(changed)} layers merged, times {scale:g}{others}")
    return model


def _passed_over(path: Path, prefix: str) -> str:
    others = [name for name in weights.SafeTensors(path) if not name.startswith(prefix)]
    if not others:
        return ""
    part = prefix.rstrip("._")
    return f"; {len(others)} tensors for other parts than {part} are not, such as {others[0]}"


def lora_scale(task: SamplingTask, paths: Paths) -> float:
    """Return the factor of LoRA weights: the user's, else the distilled model's."""
    row = task.settings.sampling.distilled_as
    usual = 1.0 if row is None else row.lora_scale
    return usual if paths.lora_scale is None else paths.lora_scale


# ---- the model's own weights ---------------------------------------------------------------------


def parts_of(task: SamplingTask, paths: Paths) -> tuple[str, ...]:
    """Return the folders of the transformers whose weights the run reads."""
    has_two = boundary_of(paths.model) is not None and paths.weights_of(SECOND).name == SECOND
    return (task.part, SECOND) if has_two else (task.part,)


def weights_errors(task: SamplingTask, paths: Paths) -> Iterator[ConfigError]:
    """Yield an error if weights are another model's, or are for block-by-block sampling."""
    yield from _given_errors(task, paths)
    setting = "model.folder" if paths.weights is None else "--weights"
    for part in parts_of(task, paths):
        yield from whole_errors(setting, paths.weights_of(part))


def _given_errors(task: SamplingTask, paths: Paths) -> Iterator[ConfigError]:
    given, both = paths.weights, boundary_of(paths.model) is not None
    if given is None:
        return
    if not given.exists():
        rule = "the folder of weights does not exist"
        remedy = "name one, such as training.output_dir of a run"
        yield ConfigError("--weights", given, rule, remedy)
    elif both and len(lacking(given, (FIRST, SECOND))) == 2:
        rule = f"a pipeline of two transformers takes a folder with {FIRST}, {SECOND} or both"
        remedy = "give the folder above, such as training.output_dir of a run"
        yield ConfigError("--weights", given, rule, remedy)
    elif (problem := class_error(given, task.family)) is not None:
        yield ConfigError("--weights", problem.value, problem.rule, problem.remedy)
    elif index_of(given) and (boundary_of(given) is not None) != both:
        ours, theirs = ("two transformers", "one") if both else ("one transformer", "two")
        rule = f"the pipeline in {paths.model} has {ours}, and this one has {theirs}"
        yield ConfigError("--weights", given, rule, "give it as --model, or weights of that model")
    else:
        for part in parts_of(task, paths):
            yield from _class_errors(task, paths, part)


def _class_errors(task: SamplingTask, paths: Paths, part: str) -> Iterator[ConfigError]:
    path = paths.weights_of(part)
    ours, theirs = (
        config_of(folder.parent, folder.name).get("_class_name")
        for folder in (part_of(paths.model, part), path)
    )
    if None not in (ours, theirs) and ours != theirs:
        rule = f"the model in {paths.model} is a {ours}"
        remedy = f"give weights of {NAMES[task.family]}"
        yield ConfigError("--weights", f"{path}: _class_name {theirs}", rule, remedy)


# ---- LoRA ----------------------------------------------------------------------------------------


def lora_errors(task: SamplingTask, paths: Paths) -> Iterator[ConfigError]:
    """Yield an error for LoRA weights that cannot be merged into the task's model."""
    if paths.lora_2 is not None and boundary_of(paths.model) is None:
        rule = "it is merged into the second of two transformers, and this pipeline has one"
        yield ConfigError("--lora-2", paths.lora_2, rule, "give --lora")
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


def family_of(names: Iterable[str]) -> tuple[str, str] | None:
    """Return the family whose layers have such names, and the first such name; else None."""
    for name in names:
        spelt = JOINED.sub(r"\1blocks", name).replace(".", "_")
        for family, layers in LAYERS.items():
            if re.search(f"(^|_){layers}", spelt):
                return family, name
    return None


def _distilled_errors(task: SamplingTask, option: str, path: Path) -> Iterator[ConfigError]:
    sampling, row = task.settings.sampling, named_by(path)
    if row is None or row.family != task.family:
        return
    steps, taken = re.search(r"(\d+)-?steps?", path.name.lower()), sampling.num_inference_steps
    if sampling.distilled != row.name:
        rule = f"its name is of {row.of}, and sampling.distilled is {sampling.distilled or 'null'}"
        remedy = f"set sampling.distilled={row.name}, or rename the file if it is another's"
        yield ConfigError(option, path, rule, remedy)
    elif steps is not None and int(steps[1]) != taken:
        rule = f"its name gives the steps of its distillation, and the run has {taken}"
        yield ConfigError(option, path, rule, f"set sampling.num_inference_steps={steps[1]}")


def _file_errors(task: SamplingTask, option: str, path: Path) -> Iterator[ConfigError]:
    if not path.exists():
        rule = "there is no such file or folder of LoRA weights"
        yield ConfigError(option, path, rule, "name a safetensors file")
        return
    try:
        names = sorted(weights.SafeTensors(path))
    except MaxattnError as error:
        remedy = "give a safetensors file of LoRA weights"
        yield ConfigError(option, error.value, error.rule, remedy)
        return
    family, name = family_of(names) or (task.family, "")
    if family == task.family:
        yield from _distilled_errors(task, option, path)
    else:
        rule = f"its layers are named as those of {NAMES[family]}, and this is {NAMES[task.family]}"
        remedy = f"give LoRA weights of {NAMES[task.family]}, or use examples/generate.py {family}"
        yield ConfigError(option, f"{path}: {name}", rule, remedy)


def _check_lora(
    task: SamplingTask, model: nnx.Module, option: str, path: Path, paths: Paths
) -> None:
    """Refuse LoRA weights that do not fit the task's model.

    Raises:
        ConfigError: it names the option of the file.
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
