"""Encode prompts (and an image) once with torch, for any number of runs without it.

    python examples/embed.py FOLDER --prompt "a red fox in snow" --to fox.safetensors
    python examples/embed.py FOLDER --prompt ... --image first.png --frames 81 --to FILE

FOLDER is a Wan, SDXL or Flux.1 pipeline in diffusers' format. examples/generate.py takes the file
by --embeddings. Needs pip install "maxattn[torch]".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from maxattn_examples import families
from maxattn_examples.common.command import user_errors
from maxattn_examples.common.pipeline_folder import PIPELINES, absent, continues_images, index_of
from maxattn_examples.sample import inputs
from maxattn_examples.sample.torch_parts import Needs, device_errors, without_torch
from maxattn_examples.wan import torch_parts as wan

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.tools.writable import unwritable

INSTEAD = "make the file on another machine"


def arguments_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("folder", type=Path, help="a pipeline in diffusers' format")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--prompt", metavar="TEXT")
    group.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    add("--negative-prompt", metavar="TEXT", help="default the empty one; SDXL: as its folder says")
    add("--image", type=Path, metavar="FILE", help="the first frame, for image-to-video")
    told = "with --image; default %(default)s"
    for name, value in (("height", 480), ("width", 832), ("frames", 81)):
        add(f"--{name}", type=int, default=value, metavar="N", help=told)
    told = "Wan, Flux.1: of a prompt; default 512, and FLUX.1-schnell takes 256"
    add("--text-tokens", type=int, default=512, metavar="N", help=told)
    add("--torch-device", default="cpu", help="cpu or cuda; default cpu")
    add("--to", type=Path, required=True, metavar="FILE", help="the file that is written")
    return parser.parse_args(arguments)


def errors_of(found: argparse.Namespace, kind: str) -> Iterator[ConfigError]:
    """Yield an error for each argument that cannot work."""
    yield from filter(None, [unwritable("--to", found.to)])
    if problems := list(absent(found.folder, "folder")):
        yield from problems
        return
    if kind not in families.ENCODERS:
        value = f"{found.folder}: {kind or 'no model_index.json'}"
        rule = f"it is a pipeline: {', '.join(chain.from_iterable(PIPELINES.values()))}"
        yield ConfigError("folder", value, rule, "give one")
        return
    index, has_image = index_of(found.folder), found.image is not None
    if not continues_images(index) and has_image != (kind == "WanImageToVideoPipeline"):
        rule = "image-to-video pipelines need an image, and others take none"
        yield ConfigError("--image", found.image or "(none)", rule, f"this is a {kind}")
    for option in ("image", "prompts"):
        if (path := getattr(found, option)) is not None and not path.is_file():
            rule = "the file does not exist"
            yield ConfigError(f"--{option}", path, rule, "name one")
    # Wan 2.2 has no image encoder.
    parts = tuple(x for x in families.ENCODERS[kind] if index.get(x) != [None, None])
    needs = Needs(parts, "transformers", INSTEAD)
    yield from without_torch("folder", "encoding a prompt", found.folder, needs)
    if has_image:
        needs = Needs(("vae",), "diffusers", INSTEAD)
        yield from without_torch("--image", "encoding an image", found.folder, needs)
    yield from device_errors("--torch-device", found.torch_device)


def main(found: argparse.Namespace) -> None:
    """Encode all prompts as one batch, and write the file."""
    if problems := list(errors_of(found, index_of(found.folder).get("_class_name", ""))):
        raise ConfigErrors(problems)
    lines = [found.prompt] if found.prompts is None else found.prompts.read_text().splitlines()
    prompts = [line for line in lines if line.strip() or found.prompts is None]
    how = (found.negative_prompt, found.text_tokens, found.torch_device)
    arrays = families.encode(found.folder, prompts, *how)
    if found.image is not None:
        size = (found.frames, found.height, found.width)
        arrays |= wan.image(found.folder, found.image, size, found.torch_device)
    for name, array in arrays.items():
        print(f"{name:<16} {list(array.shape)}, {np.abs(array).max():.3g} at most")
    print(inputs.write(found.to, arrays, str(found.folder)))


if __name__ == "__main__":
    with user_errors():
        main(arguments_of())
