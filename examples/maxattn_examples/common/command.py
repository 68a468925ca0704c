"""Shared by the commands: reading settings, joining processes, and printing a user's errors."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import maxattn as ma
from maxattn.errors import MaxattnError, escaped_output

from . import hosts
from .pipeline_folder import Family

SettingsClass = type[ma.AttentionConfig] | Callable[[str, Sequence[str]], type[ma.AttentionConfig]]
"""The class that reads a YAML file, or what returns it for the file and overrides."""
CONFIGS: Mapping[Family, str] = {
    "wan": "configs/wan_1_3b.yml",
    "sdxl": "configs/sdxl.yml",
    "flux": "configs/flux.yml",
}
"""The file that a command's help names."""


def parser_of(description: str | None, family: Family = "wan") -> argparse.ArgumentParser:
    """Make the options that all commands have: a file, overrides, the model's folder, processes.

    Args:
        family: the family whose config files the help names.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    add = parser.add_argument
    add("config", help=f"a YAML file, such as {CONFIGS[family]}")
    told = "num_inference_steps=20, attention=dot_product, model.dtype=float32"
    add("overrides", nargs="*", default=[], metavar="key=value", help=told)
    told = "weights in diffusers' format: model.folder=FOLDER"
    add("--model", metavar="FOLDER", help=told)
    _add_processes(parser)
    return parser


def _add_processes(parser: argparse.ArgumentParser) -> None:
    title = "many processes, each with its own devices; the same command in all of them"
    add = parser.add_argument_group(title).add_argument
    told = "a TPU pod, SLURM, Open MPI or Kubernetes says who"
    add("--distributed", action="store_true", help=told)
    told = "of process 0, where no cluster says it"
    add("--coordinator", metavar="HOST:PORT", help=told)
    add("--num-processes", type=int, metavar="N", help="how many there are")
    add("--process-id", type=int, metavar="I", help="which one this is, from 0")


def read_settings(
    found: argparse.Namespace,
    settings_class: SettingsClass,
    options: Mapping[str, Any],
    changes: Sequence[str] = (),
) -> Any:
    """Read the settings from a file, overrides and options; join the processes of the run.

    Args:
        options: values of keys that have an option of their own, None if it was not given.
        changes: overrides that take precedence over all of them.
    """
    given = {key: value for key, value in options.items() if value is not None}
    texts = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())
    overrides = [*found.overrides, *texts, *changes]
    is_class = isinstance(settings_class, type)
    kind = settings_class if is_class else settings_class(found.config, overrides)
    settings = kind.from_yaml(found.config, overrides)
    hosts.join(found.coordinator, found.num_processes, found.process_id, found.distributed)
    return settings


@contextmanager
def user_errors() -> Iterator[None]:
    """Print warnings; on a user's mistake or Ctrl-C, exit with a message and no traceback.

    Control characters in file names and texts are printed escaped.
    """
    try:
        with escaped_output():
            logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
            yield
    except MaxattnError as error:
        sys.exit(f"{hosts.name()}error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from the last checkpoint")
