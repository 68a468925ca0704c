"""The command line: `maxattn COMMAND ...`. A new command is one file here and one line in
`COMMANDS`.

A command is a module with `HELP` (one line), `arguments(parser)` and `run(args) -> exit status`: 0
done, 1 a refusal or what does not fit, 2 wrong usage.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from maxattn.errors import MaxattnError, did_you_mean

COMMANDS = {
    "explain": "maxattn.tools.cli.explain",
    "check": "maxattn.tools.cli.check",
    "compile": "maxattn.tools.cli.compile",
    "bench": "maxattn.tools.cli.bench",
    "tune": "maxattn.tools.cli.tune",
    "convert": "maxattn.tools.cli.convert",
}
STOPPED = 130  # what shells report of a program that Ctrl-C ended


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status.

    Args:
        argv: default the arguments of the process.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        from maxattn import __version__

        print(f"maxattn {__version__}")
        return 0
    if words[0] not in COMMANDS:
        guess = did_you_mean(words[0], COMMANDS) or f"it is one of {', '.join(COMMANDS)}"
        print(f"maxattn: no command '{words[0]}': {guess}", file=sys.stderr)
        return 2
    return _run(words[0], import_module(COMMANDS[words[0]]), words[1:])


def overview() -> str:
    """Return the list of commands."""
    lines = [f"  {name:<9}{import_module(module).HELP}" for name, module in COMMANDS.items()]
    return "\n".join(
        ("usage: maxattn COMMAND ...   (maxattn COMMAND --help says more)", "", *lines)
    )


def _run(name: str, command: Any, words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        f"maxattn {name}",
        description=command.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.arguments(parser)
    try:
        args = parser.parse_intermixed_args(
            words
        )  # overrides may stand before, between and after options
    except SystemExit as end:
        return int(end.code or 0)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        status = command.run(args)
        sys.stdout.flush()
        return status
    except MaxattnError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return STOPPED
    except BrokenPipeError:  # `maxattn ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
