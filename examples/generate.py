"""Draw samples with Wan, SDXL or Flux.1, from a folder in diffusers' format.

    python examples/generate.py wan configs/wan_1_3b.yml --model FOLDER \\
        --prompt "a red fox in snow" --out out/fox
    # image-to-video
    python examples/generate.py wan configs/wan_i2v_14b.yml --model FOLDER \\
        --prompt ... --image FILE --out DIR
    # the digits that train.py learns to stream: all forty prompts, unless one is given
    python examples/generate.py wan configs/wan_tiny_stream.yml prompt="a seven moving left"
    # several digits
    python examples/generate.py wan configs/digits_large.yml --model out/digits_large \\
        --prompt "a red three leaving left and a blue seven bouncing up" --out DIR
    python examples/generate.py sdxl configs/sdxl.yml --model FOLDER \\
        --prompt "a red fox in snow" --out out/fox
    python examples/generate.py flux configs/flux.yml --model FOLDER \\
        --prompt "a red fox in snow" --out out/fox
    # schnell takes four steps
    python examples/generate.py flux configs/flux.yml --model FOLDER model.sizes=flux.1-schnell \\
        text_tokens=256 --steps 4 --prompt ... --out DIR

The family may be left out if the file names its models. With --weights DIR the weights are those of
a training run, with --lora FILE LoRA weights are merged. Text encoders and the VAE are torch's (pip
install "maxattn[torch]"); with --embeddings FILE and --latents FILE none is needed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from maxattn_examples import families
from maxattn_examples.common import hosts
from maxattn_examples.common.command import user_errors
from maxattn_examples.digits.settings import Settings as ClipSettings
from maxattn_examples.sample.command import FILES, arguments_of, draw, settings_of

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw samples; `arguments` default to those of the process."""
    family, words = families.named(arguments)
    found = arguments_of(families.help_of(__doc__ or "", family), words, family or "wan")
    family = family or families.of_file(found.config, found.overrides)
    settings = settings_of(found, families.settings_class(family))
    if isinstance(settings, ClipSettings) and settings.on_torus:
        return digits_on_a_torus(found, settings)
    draw(found, families.sampling_task(settings), settings)


def digits_on_a_torus(found: argparse.Namespace, settings: ClipSettings) -> None:
    """Load the last checkpoint of digits on a torus, and stream one prompt, or all.

    Raises:
        ConfigErrors: files are given, which this model does not take.
        ConfigError: no checkpoint has these settings.
        InputError: the prompt cannot be read.
    """
    from maxattn_examples.digits import stream_demo
    from maxattn_examples.digits.task import ClipTask
    from maxattn_examples.digits.words import TORUS
    from maxattn_examples.train.loop import Training

    options = (*FILES, "lora-scale", "lora-lenient", "plan")
    values = {x: getattr(found, x.replace("-", "_")) for x in options}
    rule, remedy = "the small model knows forty prompts, and no files", "leave it out"
    given = {name: value for name, value in values.items() if value is not None}
    if errors := [ConfigError(f"--{name}", x, rule, remedy) for name, x in given.items()]:
        raise ConfigErrors(errors)
    if (prompt := settings.sampling.prompt) is not None:
        TORUS.encode([prompt])  # refuses unknown words before the model is loaded
    with hosts.first_speaks():
        model = Training(ClipTask.of(settings), settings.make_mesh()).trained()
        if prompt is None:
            stream_demo.demo(model, settings)
        else:
            stream_demo.draw(model, prompt, settings)


if __name__ == "__main__":
    with user_errors():
        main()
