"""Make a pipeline's folder with random weights, or load one, save it back and compare every bit.

    python examples/folder.py make /tmp/wan --model wan-2.1-t2v-1.3b --dtype bfloat16
    python examples/folder.py check /tmp/wan/transformer --save /tmp/again

If nothing can be downloaded, the other commands take such a folder as --model; their samples are
then noise. `check` prints the peak of the host's memory: tensors go to the devices one by one, so
it stays far below the model's size. On a CPU it includes the model, which is in the same memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from maxattn_examples.flux.settings import SIZES as FLUX_SIZES
from maxattn_examples.random_folder import check, make
from maxattn_examples.wan.settings import SIZES

from maxattn.errors import MaxattnError, escaped_output


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = found.add_argument
    add("what", choices=("make", "check"))
    add("folder", type=Path)
    add(
        "--model",
        choices=(*SIZES, *FLUX_SIZES, "sdxl"),
        default="wan-2.1-t2v-1.3b",
        help="for make",
    )
    add("--layers", type=int, help="for make: of a Wan transformer; default all")
    add("--save", type=Path, help="for check: where to save it back")
    told = "of the weights; default float32"
    add("--dtype", choices=("bfloat16", "float32"), default="float32", help=told)
    add("--shard-gib", type=float, default=5.0, help="the largest file; default 5")
    return found


def main(said: argparse.Namespace) -> None:
    """Run `make` or `check`."""
    shard = int(said.shard_gib * 2**30)
    if said.layers is not None and (said.layers < 1 or said.model not in SIZES):
        sys.exit("error: --layers is a number of 1 or more, of a Wan transformer")
    if said.what == "make":
        print("\n".join(map(str, make(said.folder, said.model, said.dtype, shard, said.layers))))
        return
    if said.save is None:
        sys.exit("error: check needs --save FOLDER")
    seen = check(said.folder, said.save, said.dtype, shard)
    print(json.dumps(seen))
    if differ := seen["different"]:
        sys.exit(f"{len(differ)} tensors differ: {differ[:5]}")


if __name__ == "__main__":
    try:
        with escaped_output():
            main(parser().parse_args())
    except MaxattnError as error:
        sys.exit(f"error: {error}")
