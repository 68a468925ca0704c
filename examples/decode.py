"""Decode latents into videos or pictures with a pipeline's VAE, after a run that wrote --latents.

    python examples/decode.py FOLDER latents.safetensors --out DIR --torch-device cuda

FOLDER is a Wan, SDXL or Flux.1 pipeline in diffusers' format. Needs pip install "maxattn[torch]".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from maxattn_examples.common.command import user_errors
from maxattn_examples.common.pipeline_folder import absent, config_of, continues_images, index_of
from maxattn_examples.sample import inputs, torch_parts
from maxattn_examples.sample.torch_parts import Needs, device_errors, pictures, without_torch
from maxattn_examples.wan import torch_parts as wan_torch_parts

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.tools.writable import unwritable

AXES = {"AutoencoderKLWan": 5, "AutoencoderKL": 4}  # of the latents
NEEDS = Needs(("vae",), "diffusers", "decode on another machine")


def arguments_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("folder", type=Path, help="a pipeline in diffusers' format")
    add("latents", type=Path, help="a file that --latents wrote")
    told = "where videos or pictures go"
    add("--out", type=Path, required=True, metavar="DIR", help=told)
    told = "frames a second; default 24 for Wan 2.2 TI2V, else 16"
    add("--fps", type=int, metavar="N", help=told)
    add("--torch-device", default="cpu", help="cpu or cuda; default cpu")
    return parser.parse_args(arguments)


def errors_of(found: argparse.Namespace, kind: str) -> Iterator[ConfigError]:
    """Yield an error for each argument that cannot work."""
    missing = list(absent(found.folder, "folder"))
    yield from missing or without_torch("folder", "decoding latents", found.folder, NEEDS)
    yield from device_errors("--torch-device", found.torch_device)
    if (problem := unwritable("--out", found.out, folder=True)) is not None:
        yield problem
    if kind and kind not in AXES:
        value, rule = f"{found.folder}: vae is {kind}", f"it is {' or '.join(AXES)}"
        yield ConfigError("folder", value, rule, "give Wan, SDXL or Flux.1")
    try:
        shape = inputs.shapes(found.latents, "latents", ("latents",)).get("latents", ())
    except ConfigErrors as error:
        yield from error.problems
        return
    if kind in AXES and len(shape) != AXES[kind]:
        value = f"{found.latents}: {list(shape)}"
        rule = f"an {kind} decodes latents of {AXES[kind]} axes"
        yield ConfigError("latents", value, rule, "give the folder that they were drawn from")


def decode(found: argparse.Namespace, latents: np.ndarray, video: bool) -> Iterator[Path]:
    """Decode samples and write their files, one sample at a time."""
    if video:
        fps = found.fps or (24 if continues_images(index_of(found.folder)) else 16)
        videos = wan_torch_parts.decode(found.folder, latents, found.torch_device)
        for i, frames in enumerate(videos):
            yield torch_parts.video(frames, found.out / f"{i:03}", fps)
        return
    for i, picture in enumerate(pictures(found.folder, latents, found.torch_device)):
        yield torch_parts.picture(picture, found.out / f"{i:03}.png")


def main(found: argparse.Namespace) -> None:
    """Check the arguments, then decode the file of latents."""
    kind = config_of(found.folder, "vae").get("_class_name", "")
    if problems := list(errors_of(found, kind)):
        raise ConfigErrors(problems)
    latents = inputs.read(found.latents, "latents")["latents"].astype(np.float32)
    for path in decode(found, latents, kind == "AutoencoderKLWan"):
        print(path)


if __name__ == "__main__":
    with user_errors():
        main(arguments_of())
