"""Draw videos: with Wan 2.1 from a folder in diffusers' format, or with the small model that
`train_wan.py` trained.

    python examples/generate_wan.py configs/wan_1_3b.yml --model FOLDER --prompt "a red fox in snow"
    --out out/fox python examples/generate_wan.py configs/wan_1_3b.yml --model FOLDER --embeddings
    FILE --latents FILE python examples/generate_wan.py configs/wan_1_3b.yml --model FOLDER
    --weights out/wan_1_3b --prompt ... --out DIR python examples/generate_wan.py
    configs/wan_i2v_14b.yml --model FOLDER --prompt ... --image FILE --out DIR python
    examples/generate_wan.py configs/wan_tiny.yml prompt="a seven moving left"

Text encoders and the VAE are torch's (pip install "maxattn[torch]"); with --embeddings and
--latents none is needed. The small model draws all forty prompts and judges them, unless one is
given.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from digits import text
from digits.command import demo_or_wan21, tell
from digits.drawing import draw_all, draw_prompt
from digits.settings import Settings as DemoSettings
from digits.training import trained
from generate.command import FILES, arguments_of, paths_of, settings_of
from generate.files import wrong
from generate.run import generate
from train import hosts
from wan.drawing import WanDrawing
from wan.settings import Settings
from wan.task import sizes_of

from maxattn.config.errors import ConfigErrors
from maxattn.errors import ConfigError


def demo(settings: DemoSettings) -> None:
    """Load the last checkpoint of the small model and draw.

    Raises:
        ConfigError: nothing is to be drawn, or there is no checkpoint of these settings.
        InputError: the prompt has words outside the vocabulary.
    """
    prompt, each = settings.sampling.prompt, settings.sampling.per_prompt
    if not each:
        raise ConfigError(
            "sampling.per_prompt", each, "at least one video of a prompt is drawn", "use 1 or more"
        )
    if prompt is not None:
        text.encode([prompt])
    model = trained(settings, settings.make_mesh())
    if prompt is None:
        draw_all(model, settings)
    else:
        draw_prompt(model, prompt, settings)


def main(found: argparse.Namespace) -> None:
    """Draw what the arguments say."""
    settings = settings_of(found, demo_or_wan21)
    with hosts.first_speaks():
        if isinstance(settings, Settings):
            paths = paths_of(found, settings.model.folder)
            kind = WanDrawing(settings, sizes_of(settings.model), Path(paths.model))
            generate(kind, paths, settings.make_mesh())
            return
        if given := [name for name in FILES if getattr(found, name) is not None]:
            rule, remedy = "the small model knows forty prompts, and no files", "leave it out"
            raise ConfigErrors(
                [wrong(f"--{name}", getattr(found, name), rule, remedy) for name in given]
            )
        demo(settings)


if __name__ == "__main__":
    with tell():
        main(arguments_of(__doc__))
