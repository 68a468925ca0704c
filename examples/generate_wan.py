"""Draw videos with the model that `train_wan.py` trained.

    python examples/generate_wan.py configs/wan_tiny.yml prompt="a seven moving left"
    python examples/generate_wan.py configs/wan_tiny.yml guidance_scale=1

Without a prompt all forty are drawn and judged.
"""

from __future__ import annotations

from wan import hosts, text
from wan.command import settings_of, tell
from wan.drawing import draw_all, draw_prompt
from wan.settings import Settings
from wan.training import trained

from maxattn.errors import ConfigError


def main(settings: Settings) -> None:
    """Load the last checkpoint and draw.

    Raises:
        ConfigError: nothing is to be drawn, or there is no checkpoint of these settings.
        InputError: the prompt has words outside the vocabulary.
    """
    prompt, each = settings.sampling.prompt, settings.sampling.per_prompt
    if not each:
        raise ConfigError("sampling.per_prompt", each, "at least one video of a prompt is drawn", "use 1 or more")
    if prompt is not None:
        text.encode([prompt])
    state = trained(settings, settings.make_mesh())
    if prompt is None:
        draw_all(state.average, settings)
    else:
        draw_prompt(state.average, prompt, settings)


if __name__ == "__main__":
    with tell():
        settings = settings_of(__doc__)
        with hosts.first_speaks():
            main(settings)
