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

from common import hosts
from common.command import user_errors
from sample.command import arguments_of, paths_of, settings_of
from sample.run import generate
from sdxl.sampling_task import SdxlSamplingTask
from sdxl.settings import Settings, sizes_of


def main(found: argparse.Namespace) -> None:
    """Draw what the arguments say."""
    settings = settings_of(found, lambda path, overrides: Settings)
    with hosts.first_speaks():
        paths = paths_of(found, settings.model.folder)
        task = SdxlSamplingTask(settings, sizes_of(settings.model), paths.model)
        generate(task, paths, settings.make_mesh())


if __name__ == "__main__":
    with user_errors():
        main(arguments_of(__doc__))
