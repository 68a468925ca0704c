"""Draw pictures with FLUX.1-dev or FLUX.1-schnell, from a folder in diffusers' format.

    python examples/generate_flux.py configs/flux.yml --model FOLDER \\
        --prompt "a red fox in snow" --out out/fox
    # schnell takes four steps
    python examples/generate_flux.py configs/flux.yml --model FOLDER model.sizes=flux.1-schnell \\
        text_tokens=256 --steps 4 --prompt ... --out DIR
    # without torch
    python examples/generate_flux.py configs/flux.yml --model FOLDER \\
        --embeddings FILE --latents FILE
    # with LoRA weights
    python examples/generate_flux.py configs/flux.yml --model FOLDER \\
        --lora FILE --prompt ... --out DIR

Text encoders and the VAE are torch's (pip install "maxattn[torch]"); with --embeddings and
--latents none is needed.
"""

from __future__ import annotations

import argparse

from maxattn_examples.flux.sampling_task import FluxSamplingTask
from maxattn_examples.flux.settings import Settings
from maxattn_examples.sample.command import command, draw, settings_of


def main(found: argparse.Namespace) -> None:
    """Draw what the arguments say."""
    draw(found, FluxSamplingTask, settings_of(found, Settings))


if __name__ == "__main__":
    command(__doc__, "flux", main)
