"""Draw pictures with SDXL, from a folder in diffusers' format.

    python examples/generate_sdxl.py configs/sdxl.yml --model FOLDER --prompt "a red fox in snow"
    --out out/fox python examples/generate_sdxl.py configs/sdxl.yml --model FOLDER --embeddings FILE
    --latents FILE python examples/generate_sdxl.py configs/sdxl.yml --model FOLDER --lora FILE
    --prompt ... --out DIR sampler=ddim

Text encoders and the VAE are torch's (pip install "maxattn[torch]"); with --embeddings and
--latents none is needed.
"""

from __future__ import annotations

import argparse

from digits.command import tell
from generate.command import arguments_of, paths_of, settings_of
from generate.run import generate
from sdxl.drawing import SdxlDrawing
from sdxl.settings import Settings
from sdxl.task import sizes_of
from train import hosts


def main(found: argparse.Namespace) -> None:
    """Draw what the arguments say."""
    settings = settings_of(found, lambda path, overrides: Settings)
    with hosts.first_speaks():
        paths = paths_of(found, settings.model.folder)
        generate(
            SdxlDrawing(settings, sizes_of(settings.model), paths.model),
            paths,
            settings.make_mesh(),
        )


if __name__ == "__main__":
    with tell():
        main(arguments_of(__doc__))
