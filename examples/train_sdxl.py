"""Train SDXL's UNet on a folder of latents and texts, all of it or LoRA alone.

    # from random weights
    python examples/train_sdxl.py configs/sdxl.yml --data FOLDER
    # from diffusers' weights
    python examples/train_sdxl.py configs/sdxl.yml --data FOLDER --model FOLDER
    # LoRA
    python examples/train_sdxl.py configs/sdxl.yml --data FOLDER --model FOLDER lora_rank=16

examples/make_latents.py makes the folder. The same command goes on after a kill, from the last
checkpoint, bit for bit.
"""

from __future__ import annotations

from common import hosts
from common.command import settings_of, user_errors
from sdxl.settings import Settings
from sdxl.task import SdxlTask
from train.loop import Training


def main(settings: Settings) -> None:
    """Train what the settings describe."""
    Training(SdxlTask.of(settings), settings.make_mesh()).run()


if __name__ == "__main__":
    with user_errors():
        settings = settings_of(__doc__, lambda path, overrides: Settings)
        with hosts.first_speaks():
            main(settings)
