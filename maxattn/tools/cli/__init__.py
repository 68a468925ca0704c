"""The command line: `maxattn COMMAND ...`.

A new command is a line in `COMMANDS`, a function in options.py, and a file here with
`run(args) -> exit status`: 0 done, 1 refused or does not fit, 2 wrong usage. The file is imported
when the command is run.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module

from maxattn import __version__
from maxattn.errors import MaxattnError, did_you_mean, escaped_output
from maxattn.tools.cli.options import parser_of

COMMANDS = {
    "explain": "what would run for a shape, and why; for any machine, without a device",
    "check": "validate a config; print what it sets, its plans, memory and advice",
    "compile": "compile for a TPU without having one: memory, time, transfers, whether it fits",
    "bench": "measure kernels on this machine: device time, TFLOP/s, memory, error",
    "audit": "measure a model's own activations by layer and head; name what is unsafe",
    "tune": "time kernels or block sizes on this machine and keep the fastest",
    "convert": "print another program's YAML (MaxDiffusion, Self-Forcing) as maxattn's",
    "config": "list the keys of a config, or explain one: values, default, meaning",
    "completion": "print a script with which bash, zsh or fish completes command lines",
}
STOPPED, TERMINATED = 130, 143  # exit status that shells report after Ctrl-C or TERM


class Terminated(KeyboardInterrupt):
    """Raised when the process is sent TERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    with escaped_output():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        usage = "usage: maxattn COMMAND ...   (maxattn COMMAND --help lists options)"
        print("\n".join((usage, "", *(f"  {n:<12}{does}" for n, does in COMMANDS.items()))))
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"maxattn {__version__}")
        return 0
    if words[0] not in COMMANDS:
        guess = did_you_mean(words[0], COMMANDS) or f"it must be one of {', '.join(COMMANDS)}"
        print(f"maxattn: no command '{words[0]}': {guess}", file=sys.stderr)
        return 2
    return _run(words[0], words[1:])


def _run(name: str, words: Sequence[str]) -> int:
    parser = parser_of(name)
    try:
        # Overrides may stand before, between and after options.
        args, unknown = parser.parse_known_intermixed_args(words)
    except SystemExit as end:
        return int(end.code or 0)
    if unknown:
        print("\n".join(_unknown(parser, word) for word in unknown), file=sys.stderr)
        return 2
    command = import_module(f"{__name__}.{name}")
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        with term_interrupts():
            status = command.run(args)
        sys.stdout.flush()
        return status
    except MaxattnError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt as stop:
        print("stopped", file=sys.stderr)
        return TERMINATED if isinstance(stop, Terminated) else STOPPED
    except BrokenPipeError:  # `maxattn ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


@contextmanager
def term_interrupts() -> Iterator[None]:
    """Make TERM end a command as Ctrl-C does, together with its child processes."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may
        yield
        return

    def terminate(*_: object) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _unknown(parser: argparse.ArgumentParser, word: str) -> str:
    option = word.partition("=")[0]
    known = [name for name in parser._option_string_actions if name.startswith("--")]
    others = [name for name in COMMANDS if option in parser_of(name)._option_string_actions]
    guess = did_you_mean(option, known) or f"{parser.prog} --help lists the options"
    guess = f"it is an option of maxattn {', '.join(others)}" if others else guess
    return f"{parser.prog}: no option '{option}': {guess}"
