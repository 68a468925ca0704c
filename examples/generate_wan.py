"""Draw videos with the model that `train_wan.py` trained.

    python examples/generate_wan.py configs/wan_tiny.yml prompt="a seven moving left"
    python examples/generate_wan.py configs/wan_tiny.yml guidance_scale=1

Without a prompt all forty are drawn and judged.
"""

from __future__ import annotations

from wan.command import settings_of, tell
from wan.drawing import draw_all, draw_prompt
from wan.settings import Settings
from wan.training import trained


def main(settings: Settings) -> None:
    """Load the last checkpoint and draw."""
    state = trained(settings, settings.make_mesh())
    if settings.sampling.prompt is None:
        draw_all(state.average, settings)
    else:
        draw_prompt(state.average, settings.sampling.prompt, settings)


if __name__ == "__main__":
    with tell():
        main(settings_of(__doc__))
