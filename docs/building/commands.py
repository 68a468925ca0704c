"""The pages of the command line: what each command says of itself."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from io import StringIO
from unittest.mock import patch

from maxattn.tools.cli import COMMANDS, main


def text() -> str:
    """Return a section for each command."""
    sections = [f"## {name}\n\n{does}\n\n{block(help_of(name))}" for name, does in COMMANDS.items()]
    return "\n\n".join([block(help_of()), *sections])


def help_of(*names: str) -> str:
    """Return what `maxattn NAME --help` prints, or without a name `maxattn --help`."""
    with patch.dict(os.environ, COLUMNS="88"), redirect_stdout(StringIO()) as out:
        main([*names, "--help"])
    return out.getvalue()


def block(words: str) -> str:
    """Return a text as it is, in a block."""
    return f"```text\n{words.strip()}\n```"
