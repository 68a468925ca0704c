"""Train Wan, SDXL or Flux.1 on a folder of latents and texts: every parameter, or LoRA alone.

    # from random weights
    python examples/train.py wan configs/wan_1_3b.yml --data FOLDER
    # from diffusers' weights
    python examples/train.py wan configs/wan_1_3b.yml --data FOLDER --model FOLDER
    # LoRA
    python examples/train.py wan configs/wan_1_3b.yml --data FOLDER --model FOLDER lora_rank=16
    # digits that are streamed, block by block
    python examples/train.py wan configs/wan_tiny_stream.yml
    # several digits that cross, leave and come back
    python examples/train.py wan configs/digits_large.yml
    python examples/train.py sdxl configs/sdxl.yml --data FOLDER --model FOLDER lora_rank=16
    # LoRA, as the file says
    python examples/train.py flux configs/flux.yml --data FOLDER --model FOLDER
    # every parameter
    python examples/train.py flux configs/flux.yml --data FOLDER --model FOLDER lora_rank=0

The family may be left out if the file names its models. examples/make_latents.py makes the folder.
The same command goes on after a kill, from the last checkpoint, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxattn_examples import families
from maxattn_examples.common import hosts, pictures
from maxattn_examples.common.command import parser_of, read_settings, user_errors
from maxattn_examples.digits.settings import Settings as ClipSettings
from maxattn_examples.train import train


def main(arguments: Sequence[str] | None = None) -> None:
    """Train a model; `arguments` default to those of the process."""
    family, words = families.named(arguments)
    parser = parser_of(families.help_of(__doc__ or "", family), family or "wan")
    parser.add_argument("--data", metavar="FOLDER", help="latents and texts: data.folder=FOLDER")
    found = parser.parse_intermixed_args(words)  # overrides may come after options
    family = family or families.of_file(found.config, found.overrides)
    folders = {"model.folder": found.model, "data.folder": found.data}
    settings = read_settings(found, families.settings_class(family), folders)
    with hosts.first_speaks():
        model, losses = train(families.training_task(settings))
        if isinstance(settings, ClipSettings) and settings.on_torus:
            show(settings, model, losses)


def show(settings: ClipSettings, model: Any, losses: Sequence[float]) -> None:
    """Draw the loss of digits on a torus; stream videos of them and judge these."""
    from maxattn_examples.digits import stream_demo

    if hosts.is_first():
        path = Path(settings.training.output_dir) / "loss.png"
        print(f"loss curve: {pictures.loss_curve(losses, path)}")
    if settings.sampling.per_prompt and settings.training.forcing != "none":
        stream_demo.demo(model, settings)


if __name__ == "__main__":
    with user_errors():
        main()
