"""Read a MaxDiffusion YAML and print ours: its attention and mesh keys, what was read otherwise,
what was left out.

maxattn convert base_wan_14b.yml > attention.yml
maxattn check --maxdiffusion base_wan_14b.yml --shape wan-14b-720p --target "TPU v6e"
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from maxattn.config import AttentionConfig
from maxattn.config.maxdiffusion import Imported
from maxattn.config.write import yaml_of

HELP = "print the attention settings of a MaxDiffusion YAML as ours"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("file", metavar="FILE", help="a MaxDiffusion YAML")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="in our names"
    )


def run(args: argparse.Namespace) -> int:
    """Print the YAML, with notes and names as comments."""
    imported = AttentionConfig.from_maxdiffusion(args.file, args.overrides)
    print(
        "# Attention settings of"
        f" {Path(args.file).name}\n{comments(imported)}{yaml_of(imported.config)}",
        end="",
    )
    return 0


def comments(imported: Imported) -> str:
    """Write notes and names as YAML comments."""
    lines = [
        f"# {line}"
        for note in imported.notes
        for line in textwrap.wrap(note, 116, subsequent_indent="  ")
    ]
    if imported.left_out:
        names = f"Left out: {', '.join(imported.left_out)}"
        lines += [f"# {line}" for line in textwrap.wrap(names, 116, subsequent_indent="  ")]
    return "".join(f"{line}\n" for line in lines)
