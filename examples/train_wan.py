"""Train a Wan-style video model: Wan 2.1 on a folder of latents, or a small one on moving
handwritten digits.

    python examples/train_wan.py configs/wan_1_3b.yml --data FOLDER                     # from
    random weights python examples/train_wan.py configs/wan_1_3b.yml --data FOLDER --model FOLDER
    # from diffusers' weights python examples/train_wan.py configs/wan_1_3b.yml --data FOLDER
    --model FOLDER lora_rank=16 python examples/train_wan.py configs/wan_tiny.yml
    # the digits; draws and judges

examples/make_latents.py makes the folder. The same command goes on after a kill, from the last
checkpoint, bit for bit.
"""

from __future__ import annotations

import time
from pathlib import Path

from digits import pictures
from digits.command import demo_or_wan21, settings_of, tell
from digits.drawing import draw_all
from digits.settings import Settings as DemoSettings
from digits.training import train
from train import hosts
from train.loop import Training
from wan.settings import Settings
from wan.task import WanTask


def demo(settings: DemoSettings) -> None:
    """Train on digits, draw the loss curve, then draw and judge videos."""
    began = time.perf_counter()
    model, losses = train(settings, settings.make_mesh())
    trained = time.perf_counter()
    if hosts.is_first():
        print(
            "loss curve:"
            f" {pictures.loss_curve(losses, Path(settings.training.output_dir) / 'loss.png')}"
        )
    if settings.sampling.per_prompt:
        draw_all(model, settings)
    done = time.perf_counter()
    print(f"training {trained - began:.0f} s, drawing and judging {done - trained:.0f} s")


def main(settings: DemoSettings | Settings) -> None:
    """Train what the settings describe."""
    if isinstance(settings, Settings):
        Training(WanTask.of(settings), settings.make_mesh()).run()
    else:
        demo(settings)


if __name__ == "__main__":
    with tell():
        settings = settings_of(__doc__, kind=demo_or_wan21)
        with hosts.first_speaks():
            main(settings)
