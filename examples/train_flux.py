"""Train Flux.1's transformer on a folder of latents and texts, all of it or LoRA alone.

    # LoRA
    python examples/train_flux.py configs/flux.yml --data FOLDER --model FOLDER
    # every parameter
    python examples/train_flux.py configs/flux.yml --data FOLDER --model FOLDER lora_rank=0

examples/make_latents.py makes the folder. The same command goes on after a kill, from the last
checkpoint, bit for bit.
"""

from __future__ import annotations

from common import hosts
from common.command import settings_of, user_errors
from flux.settings import Settings
from flux.task import FluxTask
from train.loop import Training


def main(settings: Settings) -> None:
    """Train what the settings describe."""
    Training(FluxTask.of(settings), settings.make_mesh()).run()


if __name__ == "__main__":
    with user_errors():
        settings = settings_of(__doc__, lambda path, overrides: Settings)
        with hosts.first_speaks():
            main(settings)
