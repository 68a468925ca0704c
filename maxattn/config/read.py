"""Reads a YAML file that holds a mapping, and says what is there where it does not."""

from __future__ import annotations

import os
from difflib import get_close_matches
from pathlib import Path

from maxattn.config.document import Document, parse, too_large
from maxattn.config.errors import ConfigErrors, refused, show
from maxattn.config.plain_json import read_bounded
from maxattn.config.yaml_loader import MOST_BYTES


def read(source: str) -> Document:
    """Read a YAML file that holds a mapping.

    Raises:
        ConfigErrors: when it is missing, empty, no YAML, or holds something else than a mapping.
    """
    document = parse(_text(source), lambda line: f"{source}:{line}")
    if document.data is None:
        rule, remedy = "it holds at least one `key: value`", "write `attention: auto`"
        raise refused(source, "(empty)", rule, remedy)
    if not isinstance(document.data, dict):
        raise _no_mapping(source, document.data)
    return document


def _no_mapping(source: str, data: object) -> ConfigErrors:
    is_list = isinstance(data, list)
    kind = "a list" if is_list else "a single value"
    rule = f"the file is a mapping of keys to values; this is {kind}"
    dash = ", no dash before them" if is_list else ""
    return refused(source, show(data), rule, f"write `key: value` lines{dash}")


def _text(source: str) -> str:
    try:
        return read_bounded(Path(source), MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        rule = f"a config is text in UTF-8; byte {error.start} is not"
        raise refused(source, "not text", rule, "save the file as UTF-8") from None
    except ValueError as error:
        raise too_large(source, str(error)) from None
    except OSError as error:
        raise _unreadable(source, error) from None


def _unreadable(source: str, error: OSError) -> ConfigErrors:
    if isinstance(error, FileNotFoundError):
        rule = "a config is a YAML file that exists"
        return refused(source, "not found", rule, _nearby(Path(source).parent, Path(source).name))
    if isinstance(error, IsADirectoryError):
        nearby = _nearby(Path(source), Path(source).name)
        return refused(source, "a folder", "a config is a YAML file", nearby)
    rule = f"a config is a file that can be read, and the system says: {error.strerror or error}"
    return refused(source, "not readable", rule, "name another file, or mend its permissions")


def _nearby(folder: Path, name: str) -> str:
    """Suggest a file of the folder, by likeness, else all of its YAML files."""
    is_there = os.path.isdir(folder)  # False also where it may not be looked at
    found = sorted(p.name for p in folder.glob("*.y*ml")) if is_there else []
    like = get_close_matches(name, found, n=1)
    if like:
        return f"did you mean '{folder / like[0]}'?"
    return f"name one of {', '.join(found)}" if found else f"there is no YAML file in '{folder}'"
