"""Draw videos with Wan 2.1 and 2.2, or with the small model of digits that `train_wan.py` trained.

    python examples/generate_wan.py configs/wan_1_3b.yml --model FOLDER \\
        --prompt "a red fox in snow" --out out/fox
    # without torch
    python examples/generate_wan.py configs/wan_1_3b.yml --model FOLDER \\
        --embeddings FILE --latents FILE
    # with the weights of a training run
    python examples/generate_wan.py configs/wan_1_3b.yml --model FOLDER \\
        --weights out/wan_1_3b --prompt ... --out DIR
    # image-to-video
    python examples/generate_wan.py configs/wan_i2v_14b.yml --model FOLDER \\
        --prompt ... --image FILE --out DIR
    # the digits
    python examples/generate_wan.py configs/wan_tiny.yml prompt="a seven moving left"
    # several digits, of a model that train_wan.py trained
    python examples/generate_wan.py configs/digits_large.yml --model out/digits_large \\
        --prompt "a red three leaving left and a blue seven bouncing up" --out DIR
    # the small one, streamed
    python examples/generate_wan.py configs/wan_tiny_stream.yml prompt="a seven moving left"

FOLDER is in diffusers' format. Text encoders and the VAE are torch's (pip install
"maxattn[torch]"); with --embeddings and --latents none is needed. The small model draws all forty
prompts and judges them, unless one is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from maxattn_examples.common import hosts
from maxattn_examples.digits import stream_demo, text
from maxattn_examples.digits.drawing import draw_all, draw_prompt
from maxattn_examples.digits.settings import Settings as DigitsSettings
from maxattn_examples.digits.training import trained
from maxattn_examples.digits_large.sampling_task import ClipSamplingTask
from maxattn_examples.digits_large.settings import Settings as ClipSettings
from maxattn_examples.digits_large.settings import describes_clips
from maxattn_examples.sample.command import FILES, command, draw, settings_of
from maxattn_examples.wan.sampling_task import WanSamplingTask
from maxattn_examples.wan.settings import Settings, describes_wan

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError


def digits(settings: DigitsSettings) -> None:
    """Load the last checkpoint of the small model and draw.

    Raises:
        ConfigError: nothing is to be drawn, or there is no checkpoint of these settings.
        InputError: the prompt has words outside the vocabulary.
    """
    prompt, each = settings.sampling.prompt, settings.sampling.per_prompt
    if not each:
        rule = "at least one video of a prompt is drawn"
        raise ConfigError("sampling.per_prompt", each, rule, "use 1 or more")
    if prompt is not None:
        text.encode([prompt])  # refuses unknown words before the model is loaded
    model = trained(settings, settings.make_mesh())
    if settings.rollout is not None:
        stream_demo.draw(model, prompt, settings)
    elif prompt is None:
        draw_all(model, settings)
    else:
        draw_prompt(model, prompt, settings)


def settings_class(path: str, overrides: Sequence[str]) -> type[DigitsSettings] | type[Settings]:
    """Choose the class that reads a file with these overrides."""
    if describes_clips(path, overrides):
        return ClipSettings
    return Settings if describes_wan(path, overrides) else DigitsSettings


def main(found: argparse.Namespace) -> None:
    """Draw what the arguments say."""
    settings = settings_of(found, settings_class)
    if isinstance(settings, ClipSettings):
        return draw(found, ClipSamplingTask, settings)
    if isinstance(settings, Settings):
        return draw(found, WanSamplingTask, settings)
    with hosts.first_speaks():
        options = (*FILES, "lora-scale", "lora-lenient", "plan")
        values = {x: getattr(found, x.replace("-", "_")) for x in options}
        given = {name: value for name, value in values.items() if value is not None}
        rule, remedy = "the small model knows forty prompts, and no files", "leave it out"
        if given:
            errors = [ConfigError(f"--{name}", path, rule, remedy) for name, path in given.items()]
            raise ConfigErrors(errors)
        digits(settings)


if __name__ == "__main__":
    command(__doc__, "wan", main)
