"""Draw pictures with SDXL, from a folder in diffusers' format.

    python examples/generate_sdxl.py configs/sdxl.yml --model FOLDER \\
        --prompt "a red fox in snow" --out out/fox
    # without torch
    python examples/generate_sdxl.py configs/sdxl.yml --model FOLDER \\
        --embeddings FILE --latents FILE
    # with LoRA weights
    python examples/generate_sdxl.py configs/sdxl.yml --model FOLDER \\
        --lora FILE --prompt ... --out DIR sampler=ddim

Text encoders and the VAE are torch's (pip install "maxattn[torch]"); with --embeddings and
--latents none is needed.
"""

from __future__ import annotations

import argparse

from maxattn_examples.sample.command import command, draw, settings_of
from maxattn_examples.sdxl.sampling_task import SdxlSamplingTask
from maxattn_examples.sdxl.settings import Settings


def main(found: argparse.Namespace) -> None:
    """Draw what the arguments say."""
    draw(found, SdxlSamplingTask, settings_of(found, Settings))


if __name__ == "__main__":
    command(__doc__, "sdxl", main)
