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

from common import hosts
from common.command import user_errors
from flux.sampling_task import FluxSamplingTask
from flux.settings import Settings, sizes_of
from sample.command import arguments_of, paths_of, settings_of
from sample.run import generate


def main(found: argparse.Namespace) -> None:
    """Draw what the arguments say."""
    settings = settings_of(found, lambda path, overrides: Settings)
    with hosts.first_speaks():
        paths = paths_of(found, settings.model.folder)
        task = FluxSamplingTask(settings, sizes_of(settings.model), paths.model)
        generate(task, paths, settings.make_mesh())


if __name__ == "__main__":
    with user_errors():
        main(arguments_of(__doc__))
