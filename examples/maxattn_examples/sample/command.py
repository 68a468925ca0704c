"""The command line of sampling: files and folders, and short names for the keys of `sampling`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn_examples.common import hosts
from maxattn_examples.common.command import SettingsClass, parser_of, read_settings
from maxattn_examples.common.pipeline_folder import Family

from .check import NO_FOLDER, check_without_folder
from .inputs import Paths
from .run import explain, generate
from .task import SamplingTask

# Options that set a key: its name below `sampling`, type and help.
KEYS: dict[str, tuple[str, type, str]] = {
    "prompt": ("prompt", str, "what to draw; text encoders need maxattn[torch]"),
    "negative-prompt": ("negative_prompt", str, "what guidance leads away from"),
    "steps": ("num_inference_steps", int, "calls of the sampler"),
    "distilled": ("distilled", str, "a model or LoRA of few steps, such as lightx2v or lcm_lora"),
    "guidance": ("guidance_scale", float, "classifier-free; up to 1 is the model as it is"),
    "fast": ("fast.preset", str, "gentle, balanced or fast: fewer forwards, approximately"),
    "seed": ("seed", int, "of the noise"),
    "per-prompt": ("per_prompt", int, "samples of each prompt"),
    "height": ("height", int, "pixels"),
    "width": ("width", int, "pixels"),
    "frames": ("frames", int, "of a video: a multiple of 4, and one"),
}
FILES = {
    "embeddings": "what the model is told, from examples/embed.py, instead of a prompt",
    "image": "the picture that an image-to-video model begins with",
    "noise": "where to begin, instead of noise of the seed",
    "weights": (
        "a folder whose weights are used instead of the model's, such as the output_dir of a"
        " training run"
    ),
    "lora": "LoRA weights to merge",
    "lora-2": "the same, for the second transformer of Wan 2.2's A14B",
    "lora-names": "YAML with the names of LoRA's layers, and the model's: docs/guide/weights.md",
    "latents": "where to write latents",
    "out": "the folder for what they show, decoded with torch",
}
# Options that the help of other families does not show; they are refused by name there.
OF_WAN = ("image", "lora-2", "frames")
TOLD = {("flux", "guidance"): "what FLUX.1-dev is told; schnell is told none"}


AddOptions = Callable[[argparse.ArgumentParser], None]


def draw(
    found: argparse.Namespace, make_task: Callable[[Any, Path], SamplingTask], settings: Any
) -> None:
    """Sample as arguments and settings say.

    Args:
        found: from `arguments_of`.
        make_task: makes the task from settings and the pipeline's folder.
        settings: from `settings_of`.
    """
    with hosts.first_speaks():
        if settings.model.folder is None:
            check_without_folder(make_task(settings, Path(os.devnull)))
        paths = paths_of(found, settings.model.folder)
        task, mesh = make_task(settings, paths.model), settings.make_mesh()
        if not found.plan:
            generate(task, paths, mesh)
            return
        for line in explain(task, paths, mesh):
            print(line)


def arguments_of(
    description: str | None,
    arguments: Sequence[str] | None = None,
    family: Family = "wan",
    more: AddOptions | None = None,
) -> argparse.Namespace:
    """Parse the command line.

    Args:
        description: of the command, for its help.
        arguments: default those of the process.
        family: the family whose options the help shows.
        more: adds further options.
    """

    def shown(option: str, told: str) -> str:
        hidden = family != "wan" and option in OF_WAN
        return argparse.SUPPRESS if hidden else TOLD.get((family, option), told)

    parser = parser_of(description, family)
    add = parser.add_argument_group("files and folders").add_argument
    for name, told in FILES.items():
        metavar = "DIR" if name in ("out", "weights") else "FILE"
        add(f"--{name}", type=Path, metavar=metavar, help=shown(name, told))
    told = "multiplies LoRA weights; default 1"
    add("--lora-scale", type=float, metavar="X", help=told)
    told = "leave out LoRA weights that do not fit the model, and list them"
    add("--lora-lenient", action="store_true", default=None, help=told)
    told = "print what would run, and end: no weight is read, and no prompt is encoded"
    add("--plan", action="store_true", default=None, help=told)
    add = parser.add_argument_group("short names of keys").add_argument
    for option, (key, kind, told) in KEYS.items():
        metavar = "TEXT" if kind is str else "N"
        told = shown(option, told)
        told = told if told == argparse.SUPPRESS else f"sampling.{key}: {told}"
        add(f"--{option}", type=kind, metavar=metavar, help=told)
    if more is not None:
        more(parser)
    return parser.parse_intermixed_args(arguments)


def check_unread(found: argparse.Namespace, *names: str) -> None:
    """Refuse options that the command shares with others but does not use.

    Raises:
        ConfigErrors: one of them is given.
    """
    rule, remedy = "this command does nothing with it", "leave it out: commands that draw take it"
    given = {f"--{name}": getattr(found, name) for name in names}
    if problems := [ConfigError(key, x, rule, remedy) for key, x in given.items() if x is not None]:
        raise ConfigErrors(problems)


def settings_of(
    found: argparse.Namespace, settings_class: SettingsClass, changes: Sequence[str] = ()
) -> Any:
    """Read the settings from file, overrides and options.

    Args:
        found: from `arguments_of`.
        settings_class: reads the file.
        changes: overrides that take precedence over the arguments.
    """
    options = {"model.folder": found.model}
    for option, (key, _, _) in KEYS.items():
        options[f"sampling.{key}"] = getattr(found, option.replace("-", "_"))
    return read_settings(found, settings_class, options, changes)


def paths_of(found: argparse.Namespace, folder: str | None) -> Paths:
    """Return the files and folders that the arguments name.

    Args:
        found: from `arguments_of`.
        folder: of the model, from the settings.

    Raises:
        ConfigErrors: no folder is given.
    """
    if folder is None:
        raise ConfigErrors([NO_FOLDER])
    names = (name.replace("-", "_") for name in FILES)
    files = {name: getattr(found, name) for name in names}
    how = {"lora_scale": found.lora_scale, "lora_lenient": found.lora_lenient}
    return Paths(Path(folder), **files, **how)
