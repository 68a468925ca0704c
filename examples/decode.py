"""Decode latents into videos or pictures with a pipeline's VAE: the last step of a run that wrote
--latents.

    python examples/decode.py FOLDER latents.safetensors --out DIR --torch-device cuda

FOLDER is a Wan 2.1 or SDXL pipeline in diffusers' format. Needs pip install "maxattn[torch]".
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from digits.command import tell
from generate import files, media
from generate.checks import without_torch
from generate.files import wrong
from generate.folder import absent, config_of

from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.tools.writable import unwritable

AXES = {"AutoencoderKLWan": 5, "AutoencoderKL": 4}  # of the latents


def arguments_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("folder", type=Path, help="a pipeline in diffusers' format")
    parser.add_argument("latents", type=Path, help="a file that --latents wrote")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where videos or pictures go"
    )
    parser.add_argument(
        "--fps", type=int, default=16, metavar="N", help="frames a second; default 16"
    )
    parser.add_argument("--torch-device", default="cpu", help="cpu or cuda; default cpu")
    return parser.parse_args(arguments)


def wrong_arguments(found: argparse.Namespace, kind: str) -> Iterator[ConfigError]:
    """Yield what cannot work."""
    missing = list(absent(found.folder, "folder"))
    instead = "decode on another machine"
    yield from missing or without_torch(
        "folder", "decoding latents", found.folder, ("vae",), "diffusers", instead
    )
    if (problem := unwritable("--out", found.out, folder=True)) is not None:
        yield problem
    if kind and kind not in AXES:
        yield wrong(
            "folder",
            f"{found.folder}: vae is {kind}",
            f"it is {' or '.join(AXES)}",
            "give Wan 2.1 or SDXL",
        )
    try:
        shape = files.shapes(found.latents, "latents", ("latents",)).get("latents", ())
    except ConfigErrors as error:
        yield from error.problems
        return
    if kind in AXES and len(shape) != AXES[kind]:
        rule = f"an {kind} decodes latents of {AXES[kind]} axes"
        yield wrong(
            "latents",
            f"{found.latents}: {list(shape)}",
            rule,
            "give the folder that they were drawn from",
        )


def decode(found: argparse.Namespace, latents: np.ndarray, video: bool) -> Iterator[Path]:
    """Decode and write, one after the other."""
    if video:
        from generate import torch_wan

        for i, frames in enumerate(torch_wan.decode(found.folder, latents, found.torch_device)):
            yield media.video(frames, found.out / f"{i:03}", found.fps)
        return
    from generate import torch_sdxl

    for i, picture in enumerate(torch_sdxl.decode(found.folder, latents, found.torch_device)):
        yield media.picture(picture, found.out / f"{i:03}.png")


def main(found: argparse.Namespace) -> None:
    """Decode what the arguments say."""
    kind = config_of(found.folder, "vae").get("_class_name", "")
    if problems := list(wrong_arguments(found, kind)):
        raise ConfigErrors(problems)
    latents = files.read(found.latents, "latents")["latents"].astype(np.float32)
    for path in decode(found, latents, kind == "AutoencoderKLWan"):
        print(path)


if __name__ == "__main__":
    with tell():
        main(arguments_of())
