"""Stream a video of any length with a Wan transformer that was trained block by block.

    python examples/stream.py wan configs/wan_1_3b_stream.yml --model FOLDER \\
        --prompt "a red fox in snow" --blocks 100 --latents out/fox --out out/fox
    # another prompt from block 40 on
    python examples/stream.py wan configs/wan_1_3b_stream.yml --model FOLDER \\
        --prompt "a red fox in snow" --switch "40: it begins to run" --latents out/fox
    # continue clean latents, such as those of another run
    python examples/stream.py wan configs/wan_1_3b_stream.yml --model FOLDER \\
        --prompt "..." --prefix out/fox/latents.safetensors --latents out/more
    # without torch: a file of examples/embed.py, with a row of text for each prompt
    python examples/stream.py wan configs/wan_1_3b_stream.yml --model FOLDER \\
        --embeddings FILE --switch 40 --latents out/fox
    # without weights, for times and memory
    python examples/stream.py wan configs/wan_1_3b_stream.yml --prompt any --latents out/any

FOLDER is in diffusers' format. The latents of each block are written as soon as it is sampled, and
all of them at the end, for examples/decode.py; --out decodes them too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from maxattn_examples import families
from maxattn_examples.common import hosts
from maxattn_examples.common.command import parser_of, read_settings, user_errors
from maxattn_examples.stream.run import StreamRun, scenes_of
from maxattn_examples.wan.sampling import WanSamplingTask
from maxattn_examples.wan.settings import Settings

from maxattn.errors import ConfigError

KEYS = {"prompt": str, "negative_prompt": str, "seed": int, "height": int, "width": int}
FILES = {
    "embeddings": "what the model is told, from examples/embed.py, instead of prompts",
    "prefix": "clean latents that the video goes on from",
    "weights": "a folder whose weights are used instead of the model's",
    "out": "the folder for the video, decoded with torch",
}


def arguments_of(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; `arguments` default to those of the process.

    Raises:
        ConfigError: the family is not Wan, the only one that streams.
    """
    family, words = families.named(arguments)
    if family not in (None, "wan"):
        rule = "videos are streamed with Wan, which can be trained block by block"
        raise ConfigError("FAMILY", family, rule, "write wan, or leave it out")
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--blocks", type=int, default=10, metavar="N", help="blocks to make; default 10")
    told = "from this block on, another prompt; may be given again"
    add("--switch", action="append", default=[], metavar="BLOCK: TEXT", help=told)
    told = "the folder for the latents of each block"
    add("--latents", type=Path, required=True, metavar="DIR", help=told)
    for name, said in FILES.items():
        add(f"--{name}", type=Path, help=said)
    for name, kind in KEYS.items():
        add(f"--{name.replace('_', '-')}", type=kind, help=f"sampling.{name}")
    return parser.parse_intermixed_args(words)


def run_of(found: argparse.Namespace) -> StreamRun:
    """Return the run that the parsed arguments describe."""
    options = {"model.folder": found.model}
    options |= {f"sampling.{name}": getattr(found, name) for name in KEYS}
    settings = read_settings(found, lambda *_: Settings, options)
    where = None if settings.model.folder is None else Path(settings.model.folder)
    task = WanSamplingTask.of(settings, where or Path())
    given = {name: getattr(found, name) for name in FILES}
    scenes = scenes_of(settings.sampling.prompt, found.switch)
    return StreamRun(task, scenes, found.blocks, where, found.latents, **given)


def main(found: argparse.Namespace) -> None:
    """Stream the run that the parsed arguments describe."""
    run = run_of(found)
    with hosts.first_speaks():
        run.run(run.settings.make_mesh())


if __name__ == "__main__":
    with user_errors():
        main(arguments_of())
