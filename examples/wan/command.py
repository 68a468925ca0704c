"""What the two commands share: reading settings, and telling a user's mistake from a bug."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from maxattn.errors import MaxattnError

from .settings import Settings


def settings_of(description: str | None, arguments: Sequence[str] | None = None) -> Settings:
    """Read a YAML file and overrides from the command line.

    Args:
        description: what the command does.
        arguments: default those of the process.

    Raises:
        ConfigErrors: for everything wrong in both.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("config", help="a YAML file, such as configs/wan_tiny.yml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="steps=20, attention=dot_product, model.dim=64"
    )
    found = parser.parse_args(arguments)
    return Settings.from_yaml(found.config, found.overrides)


@contextmanager
def tell() -> Iterator[None]:
    """Show what the library warns of; end on a user's mistake with its message alone, on Ctrl-C with how to go on."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        yield
    except MaxattnError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("\nstopped; the same command goes on from the last checkpoint")
