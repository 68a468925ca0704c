"""Say what would run for each shape, and why: kernel, parallelism, block sizes, transfers.

  maxattn explain configs/wan_14b.yml --shape wan-14b-720p --target "TPU v5p" --mesh context=4
  maxattn explain attention=ring --shape 1,32760,32760,12,128 --target "NVIDIA H200" \\
      --mesh context=8
  maxattn explain --stream wan-1.3b-480p,frames=3,window=7,sink=0 --target H200

It needs no device.
"""

from __future__ import annotations

import argparse

from maxattn.plan import plan
from maxattn.tools.cli.explain_stream import stream_text
from maxattn.tools.cli.machine import machine_arguments, mesh_of, target_of
from maxattn.tools.cli.shapes import shape_arguments, shapes_of
from maxattn.tools.cli.source import config_arguments, read_source
from maxattn.tools.cli.stream import HELP


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    config_arguments(parser)
    shape_arguments(parser)
    machine_arguments(parser)
    parser.add_argument("--stream", metavar="NAME,key=value,...", help=HELP)
    text = "print the sums of every strategy that `context_parallel: auto` weighs"
    parser.add_argument("--why", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Print a plan for each shape, or what a stream costs."""
    source = read_source(args)
    if args.stream is not None:
        print(stream_text(args, source))
        return 0
    found = shapes_of(args, source)
    mesh, target = mesh_of(args, source.config), target_of(args, source.config)
    plans = [plan(shape.call(), source.config, mesh, target) for shape in found]
    print("\n\n".join(made.explain(why=args.why) for made in plans))
    return 0
