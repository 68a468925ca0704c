"""Refuse settings, sizes, files and folders that cannot work, before anything is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from maxattn import weights
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, MaxattnError
from maxattn.tools.writable import unwritable
from maxattn_examples.common.compiled import sampling_options
from maxattn_examples.common.pipeline_folder import pipeline_errors

from . import inputs
from .inputs import Paths
from .resolve import resolved
from .task import SamplingTask
from .torch_parts import Needs, device_errors, without_torch
from .weights import check_weights, lora_errors, parts_of, weights_errors


def check(task: SamplingTask, paths: Paths, writes: bool = True) -> None:
    """Refuse everything that cannot work, before prompts are encoded or weights are read.

    Args:
        writes: whether the run must write its samples to a file.

    Raises:
        ConfigErrors: all errors of settings, sizes, files and folders.
        ConfigError: the weights are of another model.
    """
    sizes = list(task.size_errors())
    device, uses_torch = task.settings.sampling.torch_device, paths.embeddings is None or paths.out
    read: list[Callable[[], Any]] = [lambda: resolved(task, paths), lambda: options(task)]
    if paths.weights is None or paths.weights.exists():
        parts = parts_of(task, paths)
        read += [partial(weights.SafeTensors, paths.weights_of(part)) for part in parts]
    _refuse(
        pipeline_errors(paths.model, task.family),
        sizes,
        _input_errors(task, paths, not sizes),
        _output_errors(task, paths, writes),
        _noise_errors(task, paths.noise) if paths.noise and not sizes else (),
        weights_errors(task, paths),
        _read_errors(read),
        lora_errors(task, paths),
        device_errors("sampling.torch_device", device) if uses_torch else (),
    )
    check_weights(task, paths)


def check_plan(task: SamplingTask, paths: Paths) -> None:
    """Refuse everything that prevents a plan.

    Raises:
        ConfigErrors: all errors of settings, sizes and folders.
    """
    sizes, given = list(task.size_errors()), paths.embeddings
    _refuse(
        pipeline_errors(paths.model, task.family),
        sizes,
        _embeddings_errors(task, given) if given is not None and not sizes else (),
        _read_errors([lambda: resolved(task, paths)]),
    )


NO_FOLDER = ConfigError(
    *("model.folder", "null", "sampling needs a model's folder in diffusers' format"),
    "give --model FOLDER, or write model.folder",
)


def check_without_folder(task: SamplingTask) -> None:
    """Refuse that there is no folder of the model, and what is wrong with the steps.

    Raises:
        ConfigErrors: with both.
    """
    _refuse([NO_FOLDER], _read_errors([lambda: resolved(task, None)]))


def options(task: SamplingTask) -> dict[str, Any]:
    """Read the compiler options for a step.

    Raises:
        ConfigError: the compiler refuses one.
    """
    return sampling_options(task.settings.sampling.compiler_options, "sampling.compiler_options")


def _read_errors(opened: Iterable[Callable[[], Any]]) -> Iterator[MaxattnError]:
    """Yield the errors that calling each function raises."""
    for read in opened:
        try:
            read()
        except MaxattnError as error:
            yield error


def _refuse(*groups: Iterable[MaxattnError]) -> None:
    found: list[ConfigError] = []
    for error in chain(*groups):
        if isinstance(error, ConfigErrors):
            found += error.problems
        elif isinstance(error, ConfigError):
            found.append(error)
        else:
            said = (error.setting, error.value, error.rule, error.remedy, error.where)
            found.append(ConfigError(*said))
    if found:
        raise ConfigErrors(found)


# ---- what the model is told ----------------------------------------------------------------------


def _input_errors(task: SamplingTask, paths: Paths, sizes_fit: bool) -> Iterator[ConfigError]:
    if paths.embeddings is not None:
        yield from _said_twice(task, paths)
        if sizes_fit:
            yield from _embeddings_errors(task, paths.embeddings)
    elif task.settings.sampling.prompt is None:
        remedy = (
            "give --prompt (text encoders of the folder, with torch), or --embeddings FILE"
            " (examples/embed.py)"
        )
        rule = "a prompt or an embeddings file is required"
        yield ConfigError("--prompt", "(none)", rule, remedy)
    else:
        yield from _guidance_errors(task)
        yield from _image_errors(task, paths.image)
        if not task.needs_torch:
            return
        needs = Needs(task.needs_torch, "transformers", "give --embeddings FILE instead")
        yield from without_torch("--prompt", "encoding a prompt", paths.model, needs)


def _said_twice(task: SamplingTask, paths: Paths) -> Iterator[ConfigError]:
    if (prompt := task.settings.sampling.prompt) is not None:
        rule = "prompts come from --embeddings or from options, not from both"
        yield ConfigError("--prompt", repr(prompt), rule, "give one of them")
    if (negative := task.settings.sampling.negative_prompt) is not None:
        rule = "an embeddings file contains the encoded negative prompt"
        remedy = "leave it out, or encode it with examples/embed.py --negative-prompt"
        yield ConfigError("--negative-prompt", repr(negative), rule, remedy)
    if paths.image is not None:
        remedy = "leave it out, or encode both with examples/embed.py"
        rule = "an embeddings file contains the encoded image"
        yield ConfigError("--image", paths.image, rule, remedy)


def _guidance_errors(task: SamplingTask) -> Iterator[ConfigError]:
    sampling = task.settings.sampling
    if sampling.negative_prompt is not None and not sampling.guided:
        key = sampling.cfg_key
        rule = f"it needs guidance, and sampling.{key} is at most 1, which turns guidance off"
        remedy = f"raise sampling.{key}, or leave it out"
        yield ConfigError("--negative-prompt", repr(sampling.negative_prompt), rule, remedy)


def _embeddings_errors(task: SamplingTask, path: Path) -> Iterator[ConfigError]:
    sampling = task.settings.sampling
    guided = sampling.guided
    found = inputs.shapes(path, "--embeddings")
    yield from inputs.shape_errors(found, task.expected(guided), path, "--embeddings")
    lengths = [found[name][1:2] for name in ("text", "negative_text") if name in found]
    if guided and sampling.guidance_batched and len(set(lengths)) > 1:
        both = " and ".join(str(n[0]) for n in lengths)
        rule = f"in one model call both prompts must have equally many tokens: {both}"
        remedy = "set it to false, or make them alike"
        yield ConfigError("sampling.guidance_batched", True, rule, remedy)


def _image_errors(task: SamplingTask, image: Path | None) -> Iterator[ConfigError]:
    if task.needs_image and image is None:
        rule = "an image-to-video model needs an image"
        remedy = "give --image FILE, or --embeddings FILE (examples/embed.py)"
        yield ConfigError("--image", "(none)", rule, remedy)
    if image is not None and not task.takes_image:
        remedy = "leave it out, or give an I2V model's folder"
        yield ConfigError("--image", image, "this model takes no image", remedy)
    if image is not None and not image.is_file():
        rule = "the file does not exist"
        yield ConfigError("--image", image, rule, "name a picture")


# ---- what is written, and where sampling begins --------------------------------------------------


def _output_errors(task: SamplingTask, paths: Paths, writes: bool) -> Iterator[ConfigError]:
    if writes and paths.out is None and paths.latents is None:
        remedy = "give --out DIR (decoded with the folder's vae, with torch), or --latents FILE"
        yield ConfigError("--out", "(none)", "samples need a folder or a file", remedy)
    for option, path in (("--out", paths.out), ("--latents", paths.latents)):
        if path is not None and (problem := unwritable(option, path, option == "--out")):
            yield problem
    if paths.out is not None and task.needs_torch:
        needs = Needs(("vae",), "diffusers", "give --latents FILE instead")
        yield from without_torch("--out", "decoding latents", paths.model, needs)


def _noise_errors(task: SamplingTask, path: Path) -> Iterator[MaxattnError]:
    found = inputs.shapes(path, "--noise", ("noise",))
    if found.get("noise", ())[1:] != task.latents:
        rule = f"the file contains noise [B, {', '.join(map(str, task.latents))}]"
        remedy = "make it for this height, width and frames"
        yield ConfigError("--noise", f"{path}: {found}", rule, remedy)
    else:
        yield from _read_errors([partial(inputs.read, path, "--noise")])
