"""Encode prompts (and an image) once with torch, for any number of runs without it.

    python examples/embed.py FOLDER --prompt "a red fox in snow" --negative-prompt "blurred" \\
        --to fox.safetensors
    python examples/embed.py FOLDER --prompt ... --image first.png --height 480 --width 832 \\
        --frames 81 --to FILE
    # one prompt a line, a batch of them
    python examples/embed.py FOLDER --prompts prompts.txt --to FILE

FOLDER is a Wan 2.1, Wan 2.2, SDXL or Flux.1 pipeline in diffusers' format. The file holds text and
negative_text; for SDXL and Flux.1 pooled and negative_pooled; for image-to-video image and
condition, or first. examples/generate.py takes it by --embeddings. Needs pip install
"maxattn[torch]".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from maxattn_examples.common.command import user_errors
from maxattn_examples.common.pipeline_folder import PIPELINES, absent, continues_images, index_of
from maxattn_examples.flux import sampling as flux
from maxattn_examples.sample import files
from maxattn_examples.sample.torch_parts import Needs, device_errors, without_torch
from maxattn_examples.sdxl import sampling as sdxl
from maxattn_examples.wan import torch_parts as wan_torch_parts

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.tools.writable import unwritable

WAN = ("tokenizer", "text_encoder")
NEEDS = {
    "WanPipeline": WAN,
    "WanImageToVideoPipeline": (*WAN, "image_encoder", "image_processor", "vae"),
    "StableDiffusionXLPipeline": (*WAN, "tokenizer_2", "text_encoder_2"),
    "FluxPipeline": (*WAN, "tokenizer_2", "text_encoder_2"),
}
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
    told = "default the empty prompt; SDXL: as its folder says"
    add("--negative-prompt", metavar="TEXT", help=told)
    add("--image", type=Path, metavar="FILE", help="the first frame, for image-to-video")
    for name, value in (("height", 480), ("width", 832), ("frames", 81)):
        told = f"with --image; default {value}"
        add(f"--{name}", type=int, default=value, metavar="N", help=told)
    told = "Wan, Flux.1: of a prompt; default 512, and FLUX.1-schnell takes 256"
    add("--text-tokens", type=int, default=512, metavar="N", help=told)
    add("--torch-device", default="cpu", help="cpu or cuda; default cpu")
    add("--to", type=Path, required=True, metavar="FILE", help="the file that is written")
    return parser.parse_args(arguments)


def errors_of(found: argparse.Namespace, kind: str) -> Iterator[ConfigError]:
    """Yield what cannot work."""
    if (problem := unwritable("--to", found.to)) is not None:
        yield problem
    if problems := list(absent(found.folder, "folder")):
        yield from problems
        return
    if kind not in NEEDS:
        rule = (
            f"it is a pipeline: {', '.join(name for names in PIPELINES.values() for name in names)}"
        )
        value = f"{found.folder}: {kind or 'no model_index.json'}"
        yield ConfigError("folder", value, rule, "give one")
        return
    yield from _option_errors(found, kind)
    needs = Needs(_parts(found.folder, kind), "transformers", INSTEAD)
    yield from without_torch("folder", "encoding a prompt", found.folder, needs)
    if found.image is not None:
        needs = Needs(("vae",), "diffusers", INSTEAD)
        yield from without_torch("--image", "encoding an image", found.folder, needs)
    yield from device_errors("--torch-device", found.torch_device)


def _parts(folder: Path, kind: str) -> tuple[str, ...]:
    """Name what encodes prompts and images; Wan 2.2 has no image encoder."""
    without = [name for name, of in index_of(folder).items() if of == [None, None]]
    return tuple(part for part in NEEDS[kind] if part not in without)


def _option_errors(found: argparse.Namespace, kind: str) -> Iterator[ConfigError]:
    may = continues_images(index_of(found.folder))
    if not may and (kind == "WanImageToVideoPipeline") != (found.image is not None):
        rule = "image-to-video pipelines need an image, and others take none"
        yield ConfigError("--image", found.image or "(none)", rule, f"this is a {kind}")
    for option in ("image", "prompts"):
        if (path := getattr(found, option)) is not None and not path.is_file():
            rule = "it names a file, and there is none"
            yield ConfigError(f"--{option}", path, rule, "name one")


def embed(found: argparse.Namespace, kind: str) -> files.Arrays:
    """Encode what the arguments say; the prompts are the batch."""
    lines = [found.prompt] if found.prompts is None else found.prompts.read_text().splitlines()
    prompts = [line for line in lines if line.strip() or found.prompts is None]
    folder, device, negative = found.folder, found.torch_device, found.negative_prompt
    if kind == "StableDiffusionXLPipeline":
        return sdxl.encode(folder, prompts, negative, device)
    if kind == "FluxPipeline":
        return flux.encode(folder, prompts, negative, found.text_tokens, device)
    told = {"text": prompts, "negative_text": [negative or ""]}
    arrays = wan_torch_parts.texts(folder, told, found.text_tokens, device)
    if found.image is not None:
        size = (found.frames, found.height, found.width)
        arrays |= wan_torch_parts.image(folder, found.image, size, device)
    return arrays


def main(found: argparse.Namespace) -> None:
    """Encode and write."""
    kind = index_of(found.folder).get("_class_name", "")
    if problems := list(errors_of(found, kind)):
        raise ConfigErrors(problems)
    arrays = embed(found, kind)
    for name, array in arrays.items():
        print(f"{name:<16} {list(array.shape)}, {np.abs(array).max():.3g} at most")
    print(files.write(found.to, arrays, str(found.folder)))


if __name__ == "__main__":
    with user_errors():
        main(arguments_of())
