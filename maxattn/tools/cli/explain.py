"""Say what would run for each shape, and why: kernel, parallelism, block sizes, transfers. Needs no
device.

maxattn explain configs/wan_14b.yml --shape wan-14b-720p --target "TPU v5p" --mesh context=4
maxattn explain attention=ring --shape 1,32760,32760,12,128 --target "NVIDIA H200" --mesh context=8
"""

from __future__ import annotations

import argparse

from maxattn.plan import plan
from maxattn.tools.cli import common

HELP = "what would run for a shape, and why; for any machine, without a device"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    common.config_arguments(parser)
    common.shape_arguments(parser)
    common.machine_arguments(parser)
    text = "print the sums of every strategy that `context_parallel: auto` weighs"
    parser.add_argument("--why", action="store_true", help=text)


def run(args: argparse.Namespace) -> int:
    """Print a plan for each shape."""
    source = common.read_source(args)
    found = common.shapes_of(args, source)
    mesh, target = common.mesh_of(args, source.config), common.target_of(args, source.config)
    plans = (plan(shape.call(), source.config, mesh, target) for shape in found)
    print(common.joined([each.explain(why=args.why) for each in plans]))
    return 0
