"""`maxattn explain`: a plan for each shape, or what a stream costs."""

from __future__ import annotations

import argparse

from maxattn.plan import plan
from maxattn.tools.cli.explain_stream import stream_text
from maxattn.tools.cli.inputs import mesh_of, read_source, shapes_of, target_of


def run(args: argparse.Namespace) -> int:
    """Print the plans."""
    source = read_source(args)
    if args.stream is not None:
        print(stream_text(args, source))
        return 0
    found = shapes_of(args, source)
    mesh, target = mesh_of(args, source.config), target_of(args, source.config)
    plans = [plan(shape.call(), source.config, mesh, target) for shape in found]
    print("\n\n".join(made.explain(why=args.why) for made in plans))
    return 0
