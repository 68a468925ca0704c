"""What the two commands share: reading settings, joining other processes, telling a user's mistake from a bug."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from maxattn.errors import MaxattnError

from . import hosts
from .settings import Settings


def settings_of(description: str | None, arguments: Sequence[str] | None = None) -> Settings:
    """Read a YAML file and overrides from the command line, and join the other processes of the run, if there are any.

    Args:
        description: what the command does.
        arguments: default those of the process.

    Raises:
        ConfigErrors: for everything wrong in both.
        ConfigError: it is not said, or wrongly, which process of how many this is.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("config", help="a YAML file, such as configs/wan_tiny.yml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="steps=20, attention=dot_product, model.dim=64"
    )
    many = parser.add_argument_group("many processes, each with its own devices; the same command in all of them")
    many.add_argument("--distributed", action="store_true", help="a TPU pod, SLURM, Open MPI or Kubernetes says who")
    many.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, where no cluster says it")
    many.add_argument("--num-processes", type=int, metavar="N", help="how many there are")
    many.add_argument("--process-id", type=int, metavar="I", help="which one this is, from 0")
    found = parser.parse_args(arguments)
    settings = Settings.from_yaml(found.config, found.overrides)
    hosts.join(found.coordinator, found.num_processes, found.process_id, found.distributed)
    return settings


@contextmanager
def tell() -> Iterator[None]:
    """Show what the library warns of; end on a user's mistake with its message alone, on Ctrl-C with how to go on."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        yield
    except MaxattnError as error:
        sys.exit(f"{hosts.name()}error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from the last checkpoint")
