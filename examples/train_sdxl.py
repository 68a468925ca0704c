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

from maxattn_examples.sdxl.settings import Settings
from maxattn_examples.sdxl.task import SdxlTask
from maxattn_examples.train.command import command, train


def main(settings: Settings) -> None:
    """Train what the settings describe."""
    train(SdxlTask, settings)


if __name__ == "__main__":
    command(__doc__, "sdxl", Settings, main)
