"""CONFIG and key=value on a command line: the config, and the sections around it."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

from maxattn.config import AttentionConfig
from maxattn.config import overrides as config_overrides
from maxattn.config.read import read


@dataclass(frozen=True)
class Source:
    """Hold what a user gave as CONFIG and key=value.

    Args:
        config: the settings of attention.
        sections: the file's values with its program's sections, overrides applied.
        path: the file, or empty for overrides alone.
        overrides: the `key=value` texts.
        notes: what was read otherwise than it was written.
    """

    config: AttentionConfig
    sections: dict[str, Any]
    path: str
    overrides: tuple[str, ...]
    notes: tuple[str, ...] = ()


def config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG and overrides."""
    add = parser.add_argument
    config = "a YAML file, such as configs/wan_14b.yml"
    overrides = "attention=ring ici_context_parallelism=4 ..."
    add("config", nargs="?", default="", metavar="CONFIG", help=config)
    add("overrides", nargs="*", default=[], metavar="key=value", help=overrides)


def read_source(args: argparse.Namespace) -> Source:
    """Read the config; a CONFIG with a = in it is an override of the defaults.

    Raises:
        ConfigErrors: for everything wrong in file and overrides.
    """
    path, overrides = args.config, tuple(args.overrides)
    if getattr(args, "maxdiffusion", False):
        return _of_maxdiffusion(path, overrides)
    if not path or ("=" in path and not os.path.exists(path)):
        overrides = tuple(text for text in (path, *overrides) if text)
        return Source(AttentionConfig.from_overrides(overrides), {}, "", overrides)
    config = AttentionConfig.from_yaml(path, overrides)
    sections = dict(read(path).data)
    config_overrides.apply(AttentionConfig, sections, overrides)
    return Source(config, sections, path, overrides)


def _of_maxdiffusion(path: str, overrides: tuple[str, ...]) -> Source:
    config, left_out, notes = AttentionConfig.from_maxdiffusion(path, overrides)
    names = (f"left out: {', '.join(left_out)}",) if left_out else ()
    return Source(config, {}, path, overrides, (*notes, *names))
