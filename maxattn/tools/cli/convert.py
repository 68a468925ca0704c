"""Read a MaxDiffusion YAML and print ours: its attention and mesh keys.

  maxattn convert base_wan_14b.yml > attention.yml
  maxattn check --maxdiffusion base_wan_14b.yml --shape wan-14b-720p --target "TPU v6e"

Comments say what was read otherwise than it was written, and what was left out.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from maxattn.config import AttentionConfig
from maxattn.config.maxdiffusion import Imported
from maxattn.config.write import yaml_of

WIDTH = 116  # columns of a comment


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("file", metavar="FILE", help="a MaxDiffusion YAML")
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="in our names"
    )


def run(args: argparse.Namespace) -> int:
    """Print the YAML, with notes and names as comments."""
    imported = AttentionConfig.from_maxdiffusion(args.file, args.overrides)
    print(f"# Attention settings of {Path(args.file).name}")
    print(comments(imported) + yaml_of(imported.config), end="")
    return 0


def comments(imported: Imported) -> str:
    """Write notes and names as YAML comments."""
    left_out = [f"Left out: {', '.join(imported.left_out)}"] if imported.left_out else []
    return "".join(_comment(text) for text in (*imported.notes, *left_out))


def _comment(text: str) -> str:
    lines = textwrap.wrap(text, WIDTH, subsequent_indent="  ")
    return "".join(f"# {line}\n" for line in lines)
