"""What the commands share: reading settings, joining other processes, telling a user's mistake from
a bug.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from train import hosts

import maxattn as ma
from maxattn.config import load
from maxattn.config import overrides as config_overrides
from maxattn.config.errors import ConfigErrors
from maxattn.errors import MaxattnError

from .settings import Settings


def settings_of(
    description: str | None,
    arguments: Sequence[str] | None = None,
    kind: Callable[[str, Sequence[str]], type[ma.AttentionConfig]] = lambda path, overrides: (
        Settings
    ),
) -> Any:
    """Read a YAML file and overrides from the command line, and join the other processes of the
    run, if there are any.

    Args:
        description: what the command does.
        arguments: default those of the process.
        kind: returns the class that reads a file with these overrides; default the demo's.

    Raises:
        ConfigErrors: for everything wrong in both.
        ConfigError: it is not said, or wrongly, which process of how many this is.
    """
    parser = parser_of(description)
    parser.add_argument("--data", metavar="FOLDER", help="latents and texts: data.folder=FOLDER")
    found = parser.parse_intermixed_args(arguments)  # overrides may stand behind options
    return read_settings(found, kind, {"model.folder": found.model, "data.folder": found.data})


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Make the arguments of every command: a YAML file, overrides, the model's folder, and which
    process this is.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("config", help="a YAML file, such as configs/wan_tiny.yml")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="key=value",
        help="steps=20, attention=dot_product, model.dim=64",
    )
    parser.add_argument(
        "--model", metavar="FOLDER", help="weights in diffusers' format: model.folder=FOLDER"
    )
    many = parser.add_argument_group(
        "many processes, each with its own devices; the same command in all of them"
    )
    many.add_argument(
        "--distributed",
        action="store_true",
        help="a TPU pod, SLURM, Open MPI or Kubernetes says who",
    )
    many.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, where no cluster says it"
    )
    many.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    many.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0")
    return parser


def read_settings(
    found: argparse.Namespace,
    kind: Callable[[str, Sequence[str]], type[ma.AttentionConfig]],
    options: Mapping[str, Any],
) -> Any:
    """Read the settings that arguments say, and join the other processes of the run.

    Args:
        found: what `parser_of` parsed.
        kind: returns the class that reads a file with these overrides.
        options: values of keys that have an option of their own; None was not given.
    """
    given = [
        f"{key}={json.dumps(value, ensure_ascii=False)}"
        for key, value in options.items()
        if value is not None
    ]
    overrides = [*found.overrides, *given]
    settings = kind(found.config, overrides).from_yaml(found.config, overrides)
    hosts.join(found.coordinator, found.num_processes, found.process_id, found.distributed)
    return settings


def demo_or_wan21(path: str, overrides: Sequence[str]) -> type[ma.AttentionConfig]:
    """Return the class that reads a file: Wan 2.1's where its model has `sizes` or a `folder`, else
    the demo's.
    """
    from wan.settings import Settings as Wan21

    try:
        sections = dict(load.read(path).data)
    except ConfigErrors:  # the class says it again
        return Settings
    with suppress(ConfigErrors):  # the same
        config_overrides.apply(Wan21, sections, overrides)
    model = sections.get("model")
    return Wan21 if isinstance(model, dict) and {"sizes", "folder"} & model.keys() else Settings


@contextmanager
def tell() -> Iterator[None]:
    """Show what the library warns of; end on a user's mistake with its message alone, on Ctrl-C
    with how to go on.
    """
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        yield
    except MaxattnError as error:
        sys.exit(f"{hosts.name()}error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from the last checkpoint")
