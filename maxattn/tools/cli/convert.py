"""`maxattn convert`: translate another program's YAML to maxattn's, with comments on changes."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from maxattn.config import AttentionConfig
from maxattn.config.document import read
from maxattn.config.errors import plain
from maxattn.config.foreign import is_rollout
from maxattn.config.load import yaml_of
from maxattn.config.maxdiffusion import Imported
from maxattn.errors import InputError
from maxattn.tools.self_forcing import ImportedRollout, load_rollout

WIDTH = 116  # most columns of a comment


def run(args: argparse.Namespace) -> int:
    """Print the YAML."""
    if is_rollout(read(args.file).data):
        print(rollout_text(args.file, args.overrides), end="")
        return 0
    imported = AttentionConfig.from_maxdiffusion(args.file, args.overrides)
    print(f"# Attention settings of {Path(args.file).name}")
    print(comments(imported) + yaml_of(imported.config), end="")
    return 0


def rollout_text(path: str, overrides: Sequence[str]) -> str:
    """Translate a YAML of Self-Forcing or LongLive to maxattn's sections."""
    if overrides:
        rule = "overrides do not apply to the section rollout: edit the written file"
        raise InputError("overrides", " ".join(overrides), rule, "leave them out")
    imported = load_rollout(path)
    model = f"model:\n  sizes: {imported.sizes}\n\n" if imported.sizes else ""
    keys = "".join(f"  {key}: {plain(value)}\n" for key, value in imported.rollout.items())
    return f"# Rollout of {Path(path).name}\n{comments(imported)}{model}rollout:\n{keys}"


def comments(imported: Imported | ImportedRollout) -> str:
    """Write the notes, and the names that were left out, as YAML comments."""
    left_out = [f"Left out: {', '.join(imported.left_out)}"] if imported.left_out else []
    wrapped = (
        textwrap.wrap(text, WIDTH, subsequent_indent="  ") for text in (*imported.notes, *left_out)
    )
    return "".join(f"# {line}\n" for lines in wrapped for line in lines)
