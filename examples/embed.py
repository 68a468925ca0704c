"""Encode prompts (and an image) with a pipeline's text encoders, once, for any number of runs
without torch.

    python examples/embed.py FOLDER --prompt "a red fox in snow" --negative-prompt "blurred" --to
    fox.safetensors python examples/embed.py FOLDER --prompt ... --image first.png --height 480
    --width 832 --frames 81 --to FILE python examples/embed.py FOLDER --prompts prompts.txt --to
    FILE            # one a line, a batch of them

FOLDER is a Wan 2.1 or SDXL pipeline in diffusers' format. The file holds text and negative_text;
for SDXL pooled and negative_pooled; for image-to-video image and condition. generate_wan.py and
generate_sdxl.py take it by --embeddings. Needs pip install "maxattn[torch]".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from digits.command import tell
from generate import files
from generate.checks import without_torch
from generate.files import wrong
from generate.folder import PIPELINES, absent, index_of

from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.tools.writable import unwritable

NEEDS = {
    "WanPipeline": ("tokenizer", "text_encoder"),
    "WanImageToVideoPipeline": (
        "tokenizer",
        "text_encoder",
        "image_encoder",
        "image_processor",
        "vae",
    ),
    "StableDiffusionXLPipeline": ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2"),
}
INSTEAD = "make the file on another machine"


def arguments_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, help="a pipeline in diffusers' format")
    said = parser.add_mutually_exclusive_group(required=True)
    said.add_argument("--prompt", metavar="TEXT")
    said.add_argument("--prompts", type=Path, metavar="FILE", help="one prompt a line")
    parser.add_argument(
        "--negative-prompt",
        metavar="TEXT",
        help="default the empty prompt; SDXL: as its folder says",
    )
    parser.add_argument(
        "--image", type=Path, metavar="FILE", help="the first frame, for image-to-video"
    )
    for name, default in (("height", 480), ("width", 832), ("frames", 81)):
        parser.add_argument(
            f"--{name}",
            type=int,
            default=default,
            metavar="N",
            help=f"with --image; default {default}",
        )
    parser.add_argument(
        "--text-tokens", type=int, default=512, metavar="N", help="Wan: of a prompt; default 512"
    )
    parser.add_argument("--torch-device", default="cpu", help="cpu or cuda; default cpu")
    parser.add_argument(
        "--to", type=Path, required=True, metavar="FILE", help="the file that is written"
    )
    return parser.parse_args(arguments)


def wrong_arguments(found: argparse.Namespace, kind: str) -> Iterator[ConfigError]:
    """Yield what cannot work."""
    if (problem := unwritable("--to", found.to)) is not None:
        yield problem
    if problems := list(absent(found.folder, "folder")):
        yield from problems
        return
    if kind not in NEEDS:
        named = ", ".join(name for names in PIPELINES.values() for name in names)
        yield wrong(
            "folder",
            f"{found.folder}: {kind or 'no model_index.json'}",
            f"it is a pipeline: {named}",
            "give one",
        )
        return
    if (kind == "WanImageToVideoPipeline") != (found.image is not None):
        rule = "image-to-video pipelines, and no others, are told an image"
        yield wrong("--image", found.image or "(none)", rule, f"this is a {kind}")
    for option in ("image", "prompts"):
        if (path := getattr(found, option)) is not None and not path.is_file():
            yield wrong(f"--{option}", path, "it names a file, and there is none", "name one")
    yield from without_torch(
        "folder", "encoding a prompt", found.folder, NEEDS[kind], "transformers", INSTEAD
    )
    if found.image is not None:
        yield from without_torch(
            "--image", "encoding an image", found.folder, ("vae",), "diffusers", INSTEAD
        )


def embed(found: argparse.Namespace, kind: str) -> files.Arrays:
    """Encode what the arguments say; the prompts are the batch."""
    lines = [found.prompt] if found.prompts is None else found.prompts.read_text().splitlines()
    prompts = [line for line in lines if line.strip() or found.prompts is None]
    if kind == "StableDiffusionXLPipeline":
        from generate import torch_sdxl

        return torch_sdxl.texts(found.folder, prompts, found.negative_prompt, found.torch_device)
    from generate import torch_wan

    said = {"text": prompts, "negative_text": [found.negative_prompt or ""]}
    arrays = torch_wan.texts(found.folder, said, found.text_tokens, found.torch_device)
    if found.image is not None:
        size = (found.frames, found.height, found.width)
        arrays |= torch_wan.image(found.folder, found.image, size, found.torch_device)
    return arrays


def main(found: argparse.Namespace) -> None:
    """Encode and write."""
    kind = index_of(found.folder).get("_class_name", "")
    if problems := list(wrong_arguments(found, kind)):
        raise ConfigErrors(problems)
    arrays = embed(found, kind)
    for name, array in arrays.items():
        print(f"{name:<16} {list(array.shape)}, {np.abs(array).max():.3g} at most")
    print(files.write(found.to, arrays, str(found.folder)))


if __name__ == "__main__":
    with tell():
        main(arguments_of())
