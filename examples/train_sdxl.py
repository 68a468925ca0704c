"""Train SDXL's UNet on a folder of latents and texts, all of it or LoRA alone.

    python examples/train_sdxl.py configs/sdxl.yml --data FOLDER                     # from random
    weights python examples/train_sdxl.py configs/sdxl.yml --data FOLDER --model FOLDER      # from
    diffusers' weights python examples/train_sdxl.py configs/sdxl.yml --data FOLDER --model FOLDER
    lora_rank=16 learning_rate=1e-4

examples/make_latents.py makes the folder. The same command goes on after a kill, from the last
checkpoint, bit for bit.
"""

from __future__ import annotations

from digits.command import settings_of, tell
from sdxl.settings import Settings
from sdxl.task import SdxlTask
from train import hosts
from train.loop import Training


def main(settings: Settings) -> None:
    """Train what the settings describe."""
    Training(SdxlTask.of(settings), settings.make_mesh()).run()


if __name__ == "__main__":
    with tell():
        settings = settings_of(__doc__, kind=lambda path, overrides: Settings)
        with hosts.first_speaks():
            main(settings)
