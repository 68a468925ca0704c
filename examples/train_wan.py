"""Train a small Wan-style text-to-video model on moving handwritten digits, then draw all forty prompts and judge them.

    python examples/train_wan.py configs/wan_tiny.yml
    python examples/train_wan.py configs/wan_tiny.yml attention=dot_product steps=20

The same command goes on after a kill, from the last checkpoint; once training is complete, it only draws.
"""

from __future__ import annotations

import time
from pathlib import Path

from wan import hosts, pictures
from wan.command import settings_of, tell
from wan.drawing import draw_all
from wan.settings import Settings
from wan.training import train


def main(settings: Settings) -> None:
    """Train, draw the loss curve, then draw and judge videos."""
    began = time.perf_counter()
    state, losses = train(settings, settings.make_mesh())
    trained = time.perf_counter()
    if hosts.is_first():
        print(f"loss curve: {pictures.loss_curve(losses, Path(settings.training.output_dir) / 'loss.png')}")
    if settings.sampling.per_prompt:
        draw_all(state.average, settings)
    done = time.perf_counter()
    print(f"training {trained - began:.0f} s, drawing and judging {done - trained:.0f} s")


if __name__ == "__main__":
    with tell():
        settings = settings_of(__doc__)
        with hosts.first_speaks():
            main(settings)
