"""What is said before anything is read: settings, sizes, files and folders that do not fit each
other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from maxattn import weights
from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError, MaxattnError
from maxattn.tools.writable import unwritable
from maxattn.tools.xla_options import xla_options

from . import files, folder
from .files import wrong
from .kind import Kind
from .paths import Paths

INSTALL = 'pip install "maxattn[torch]"'


def check(kind: Kind, paths: Paths) -> None:
    """Refuse everything that cannot work, at once.

    Raises:
        ConfigErrors: with all of it.
    """
    sizes = list(kind.wrong_sizes())
    problems = [
        *folder.wrong(paths.model, kind.part),
        *sizes,
        *_wrong_input(kind, paths, not sizes),
    ]
    problems += [
        *_wrong_output(paths),
        *_wrong_noise(kind, paths, not sizes),
        *_wrong_files(kind, paths),
    ]
    if problems:
        raise ConfigErrors([problem for error in problems for problem in _flat(error)])


def _wrong_files(kind: Kind, paths: Paths) -> Iterator[MaxattnError]:
    """Yield what the scheduler's file, those of the weights and compiler options are refused for,
    when looked at.
    """
    opened: list[Any] = [
        lambda: kind.sampler().schedule(kind.settings.sampling.num_inference_steps)
    ]
    opened += [lambda: weights.SafeTensors(paths.weights_of(kind.part)), lambda: options(kind)]
    if (lora := paths.lora) is not None:
        opened.append(lambda: weights.SafeTensors(lora))
    for look in opened:
        try:
            look()
        except MaxattnError as error:
            yield error


def options(kind: Kind) -> dict[str, Any]:
    """Read the compiler's options for a step.

    Raises:
        ConfigError: for one that the compiler refuses.
    """
    return xla_options(kind.settings.sampling.compiler_options, "sampling.compiler_options")


def _flat(error: MaxattnError) -> Iterable[ConfigError]:
    if isinstance(error, ConfigErrors):
        return error.problems
    return [
        (
            error
            if isinstance(error, ConfigError)
            else ConfigError(error.setting, error.value, error.rule, error.remedy, error.where)
        )
    ]


def _wrong_input(kind: Kind, paths: Paths, sizes_fit: bool) -> Iterator[ConfigError]:
    sampling = kind.settings.sampling
    if paths.embeddings is not None:
        if sampling.prompt is not None:
            remedy = "give one of them"
            yield wrong(
                "--prompt",
                repr(sampling.prompt),
                "what is drawn is said once, and --embeddings says it",
                remedy,
            )
        if paths.image is not None:
            remedy = "leave it out, or encode both with examples/embed.py"
            yield wrong(
                "--image", paths.image, "an embeddings file holds the encoded image", remedy
            )
        guided = sampling.guidance_scale != 1
        if sizes_fit:
            found = files.shapes(paths.embeddings, "--embeddings")
            yield from files.unlike(found, kind.expected(guided), paths.embeddings, "--embeddings")
            yield from _other_length(found, guided and sampling.guidance_batched)
        return
    if sampling.prompt is None:
        ways = (
            "give --prompt (text encoders of the folder, with torch), or --embeddings FILE"
            " (examples/embed.py)"
        )
        yield wrong("--prompt", "(none)", "a prompt or a file says what is drawn", ways)
        return
    if kind.takes_image and paths.image is None:
        rule = "an image-to-video model begins with an image"
        yield wrong(
            "--image", "(none)", rule, "give --image FILE, or --embeddings FILE (examples/embed.py)"
        )
    if not kind.takes_image and paths.image is not None:
        yield wrong(
            "--image",
            paths.image,
            "this model is told no image",
            "leave it out, or give an I2V model's folder",
        )
    if paths.image is not None and not paths.image.is_file():
        yield wrong("--image", paths.image, "it names a file, and there is none", "name a picture")
    how = (kind.needs_torch, "transformers", "give --embeddings FILE instead")
    yield from without_torch("--prompt", "encoding a prompt", paths.model, *how)


def without_torch(
    option: str, what: str, model: Path, parts: tuple[str, ...], package: str, instead: str
) -> Iterator[ConfigError]:
    """Yield why torch's part of a run cannot be done, naming both ways out.

    Args:
        option: the command's.
        what: is done, in words.
        model: the pipeline's folder.
        parts: of it that are needed.
        package: beside torch.
        instead: what to do where torch is not.
    """
    if missing := [name for name in ("torch", package) if find_spec(name) is None]:
        value, remedy = f"{' and '.join(missing)} not installed", f"{INSTALL}, or {instead}"
        yield wrong(option, value, f"{what} is done by torch and {package}", remedy)
    elif lacking := folder.lacking(model, parts):
        value, remedy = (
            f"{model} without {', '.join(lacking)}",
            f"fetch the whole folder, or {instead}",
        )
        yield wrong(
            option, value, f"{what} takes these parts of a pipeline: {', '.join(parts)}", remedy
        )


def _other_length(found: files.Shapes, batched: bool) -> Iterator[ConfigError]:
    lengths = [found[name][1:2] for name in ("text", "negative_text") if name in found]
    if batched and len(set(lengths)) > 1:
        rule = "in one call of the model both have as many tokens: " + " and ".join(
            str(n[0]) for n in lengths
        )
        yield wrong("sampling.guidance_batched", True, rule, "set it to false, or make them alike")


def _wrong_output(paths: Paths) -> Iterator[ConfigError]:
    if paths.out is None and paths.latents is None:
        ways = "give --out DIR (decoded with the folder's vae, with torch), or --latents FILE"
        yield wrong("--out", "(none)", "a folder or a file takes what is drawn", ways)
    for option, path, is_folder in (
        ("--out", paths.out, True),
        ("--latents", paths.latents, False),
    ):
        if path is not None and (problem := unwritable(option, path, is_folder)) is not None:
            yield problem
    if paths.out is not None:
        how = (("vae",), "diffusers", "give --latents FILE instead")
        yield from without_torch("--out", "decoding latents", paths.model, *how)


def _wrong_noise(kind: Kind, paths: Paths, sizes_fit: bool) -> Iterator[ConfigError]:
    if paths.noise is not None and sizes_fit:
        found = files.shapes(paths.noise, "--noise", ("noise",))
        if found.get("noise", ())[1:] != kind.latents:
            rule = f"it holds noise [B, {', '.join(map(str, kind.latents))}]"
            yield wrong(
                "--noise",
                f"{paths.noise}: {found}",
                rule,
                "make it for this height, width and frames",
            )
