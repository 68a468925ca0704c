"""Make a folder of latents and texts for training, from your tensors or from moving digits.

    python examples/make_latents.py data/mine --from clips-*.safetensors \\
        --empty negative.safetensors --model wan-2.1
    python examples/make_latents.py data/digits --digits wan --count 512

Each file of --from has some examples, batch axis first: scaled latents [B, C, F, h, w] (SDXL,
Flux.1: [B, C, h, w]); text [B, L, D]; for SDXL and Flux.1 pooled [B, P]; for SDXL time_ids [B, 6];
for image-to-video image [B, S, D] and condition [B, 4 + C, F, h, w]. --empty is an embeddings file
with negative_text (and negative_pooled), [1, ...]. Training replaces the text of some examples by
it, so that sampling can be guided; the default is zeros.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from maxattn_examples.common.command import user_errors
from maxattn_examples.digits import latents as digit_latents
from maxattn_examples.train.data import read_batches, write

from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError
from maxattn.tools.writable import unwritable

FROM = "name safetensors files of your examples; `python examples/make_latents.py --help` says what"
HOLDS = {
    "--from": f"{FROM} they hold",
    "--empty": "make it with examples/embed.py --negative-prompt, or leave it out: zeros then",
}


def parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = found.add_argument
    add("folder", help="made anew")
    add("--from", nargs="+", dest="files", metavar="FILE", help="some examples each")
    add("--empty", metavar="FILE", help="safetensors with negative_text (and negative_pooled)")
    add("--model", default="", help="what the latents are for, kept in the folder")
    add("--digits", choices=("wan", "i2v", "sdxl"), help="moving digits, for this model")
    add("--count", type=int, default=512, help="how many digits (512)")
    add("--text-dim", type=int, help="width of the digits' text states; default the real model's")
    add("--pooled-dim", type=int, default=1280, help="width of SDXL's pooled text (1280)")
    add("--per-shard", type=int, default=64, help="examples in a file (64)")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the examples, check them and write the folder.

    Raises:
        ConfigErrors: the folder exists, or the examples have different shapes.
    """
    args = parser().parse_args(arguments)
    if problems := list(_problems(args)):
        raise ConfigErrors(problems)
    how: dict[str, Any] = {"model": args.model or args.digits or "", "per_shard": args.per_shard}
    if args.digits:
        dims = (args.text_dim or (2048 if args.digits == "sdxl" else 4096), args.pooled_dim)
        examples, how["source"] = digit_latents.batches(args.digits, args.count, *dims), "digits"
        empty: Any = digit_latents.empty(args.digits, *dims)
    else:
        examples = read_batches(args.files, "--from")
        empty = next(read_batches([args.empty], "--empty")) if args.empty else None
    made = write(args.folder, examples, empty, **how)
    shapes = ", ".join(f"{name} {list(shape)}" for name, shape in made.shapes.items())
    print(f"{len(made)} examples in {made.folder}: {shapes}")


def _problems(args: Any) -> Iterator[ConfigError]:
    if (args.files is None) == (args.digits is None):
        value = "neither" if args.files is None else "both"
        yield ConfigError("--from, --digits", value, "examples have one source", "give one")
        return
    if Path(args.folder).exists():
        yield ConfigError("folder", args.folder, "the folder exists", "name another, or remove it")
    elif problem := unwritable("folder", args.folder, folder=True):
        yield problem
    for option, file in [*(("--from", file) for file in args.files or ()), ("--empty", args.empty)]:
        if file is not None and not Path(file).is_file():
            pattern = set("*?[") & set(file)
            rule = "no file matches it" if pattern else "the file does not exist"
            yield ConfigError(option, file, rule, HOLDS[option])


if __name__ == "__main__":
    with user_errors():
        main()
