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

import time
from collections.abc import Sequence
from pathlib import Path

from maxattn_examples import families
from maxattn_examples.common import hosts, pictures
from maxattn_examples.common.command import parser_of, read_settings, user_errors
from maxattn_examples.digits.settings import Settings as DigitsSettings
from maxattn_examples.train import train


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what the arguments say; default those of the process."""
    family, words = families.named(arguments)
    parser = parser_of(families.help_of(__doc__ or "", family), family or "wan")
    parser.add_argument("--data", metavar="FOLDER", help="latents and texts: data.folder=FOLDER")
    found = parser.parse_intermixed_args(words)  # overrides may come after options
    family = family or families.of_file(found.config, found.overrides)
    folders = {"model.folder": found.model, "data.folder": found.data}
    settings = read_settings(found, families.settings_class(family), folders)
    with hosts.first_speaks():
        if isinstance(settings, DigitsSettings):
            digits(settings)
        else:
            train(families.training_task(settings))


def digits(settings: DigitsSettings) -> None:
    """Train on digits, draw the loss curve, then draw and judge videos."""
    from maxattn_examples.digits.drawing import draw_all
    from maxattn_examples.digits.stream_demo import Demo
    from maxattn_examples.digits.training import train as train_digits

    began = time.perf_counter()
    model, losses = train_digits(settings, settings.make_mesh())
    trained = time.perf_counter()
    if hosts.is_first():
        path = Path(settings.training.output_dir) / "loss.png"
        print(f"loss curve: {pictures.loss_curve(losses, path)}")
    if settings.sampling.per_prompt and settings.rollout is not None:
        Demo(model, settings).run()
    elif settings.sampling.per_prompt:
        draw_all(model, settings)
    done = time.perf_counter()
    print(f"training {trained - began:.0f} s, drawing and judging {done - trained:.0f} s")


if __name__ == "__main__":
    with user_errors():
        main()
