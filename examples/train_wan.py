"""Train a Wan-style video model: Wan 2.1 on a folder of latents, or a small one on moving digits.

    # from random weights
    python examples/train_wan.py configs/wan_1_3b.yml --data FOLDER
    # from diffusers' weights
    python examples/train_wan.py configs/wan_1_3b.yml --data FOLDER --model FOLDER
    # LoRA
    python examples/train_wan.py configs/wan_1_3b.yml --data FOLDER --model FOLDER lora_rank=16
    # digits that are streamed, block by block
    python examples/train_wan.py configs/wan_tiny_stream.yml
    # several digits that cross, leave and come back
    python examples/train_wan.py configs/digits_large.yml

examples/make_latents.py makes the folder. The same command goes on after a kill, from the last
checkpoint, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from maxattn_examples.common import hosts, pictures
from maxattn_examples.digits.drawing import draw_all
from maxattn_examples.digits.settings import Settings as DigitsSettings
from maxattn_examples.digits.stream_demo import Demo
from maxattn_examples.digits.training import train as train_digits
from maxattn_examples.digits_large.distil import DistilTask
from maxattn_examples.digits_large.settings import Settings as ClipSettings
from maxattn_examples.digits_large.settings import describes_clips
from maxattn_examples.digits_large.task import ClipTask
from maxattn_examples.train.command import command, train
from maxattn_examples.wan.settings import Settings, describes_wan
from maxattn_examples.wan.task import WanTask


def digits(settings: DigitsSettings) -> None:
    """Train on digits, draw the loss curve, then draw and judge videos."""
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


def settings_class(path: str, overrides: Sequence[str]) -> type[DigitsSettings] | type[Settings]:
    """Choose the class that reads a file with these overrides."""
    if describes_clips(path, overrides):
        return ClipSettings
    return Settings if describes_wan(path, overrides) else DigitsSettings


def main(settings: DigitsSettings | Settings) -> None:
    """Train what the settings describe."""
    if isinstance(settings, ClipSettings):
        train(ClipTask if settings.training.distil is None else DistilTask, settings)
    elif isinstance(settings, Settings):
        train(WanTask, settings)
    else:
        digits(settings)


if __name__ == "__main__":
    command(__doc__, "wan", settings_class, main)
