"""Train Flux.1's transformer on a folder of latents and texts, all of it or LoRA alone.

    # LoRA
    python examples/train_flux.py configs/flux.yml --data FOLDER --model FOLDER
    # every parameter
    python examples/train_flux.py configs/flux.yml --data FOLDER --model FOLDER lora_rank=0

examples/make_latents.py makes the folder. The same command goes on after a kill, from the last
checkpoint, bit for bit.
"""

from __future__ import annotations

from maxattn_examples.flux.settings import Settings
from maxattn_examples.flux.task import FluxTask
from maxattn_examples.train.command import command, train


def main(settings: Settings) -> None:
    """Train what the settings describe."""
    train(FluxTask, settings)


if __name__ == "__main__":
    command(__doc__, "flux", Settings, main)
