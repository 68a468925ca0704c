"""A save replaces an earlier one in its folder: a reader meanwhile sees one of the two, whole.

Readers follow the index where there is one, so the switch is one rename: of the index, or of a
single file where none stands. What an index names is never written over while that index stands.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxattn.config.errors import printable
from maxattn.config.plain_json import read_json
from maxattn.errors import WeightsError

INDEX = ".safetensors.index.json"
# Two, because a save that was cut off may have left an index that names files of one of them.
ENDINGS = (".partial", ".partial2")


def swap_in(
    folder: Path,
    name: str,
    writers: Mapping[str, Callable[[Path], Any]],
    index: Mapping[str, Any] | None,
) -> None:
    """Write the files of a save beside an earlier one, switch to them, and remove it.

    Args:
        folder: made where it is missing.
        name: of the model's files.
        writers: what writes each file, by file name.
        index: what the index says, or None for a single file, which needs none.

    Raises:
        WeightsError: the folder cannot be written, or holds the index of another model, which
        readers would follow.
    """
    with _in_our_words(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _refuse_another_index(folder, name)
        stands = _named_by(folder / f"{name}{INDEX}")
        ending = next(e for e in ENDINGS if not any(file.endswith(e) for file in stands))
        _write_beside(folder, writers, ending)
        _switch(folder, name, list(writers), index, ending, covered=not stands.isdisjoint(writers))
        _remove_earlier(folder, name, {*writers, *([] if index is None else [f"{name}{INDEX}"])})


@contextmanager
def _in_our_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeError) as error:
        said = f"the system says: {getattr(error, 'strerror', None) or error}"
        rule = f"weights are written as files of a folder, and {said}"
        remedy = "give a folder that can be written and has room"
        raise WeightsError("folder", printable(str(folder), 400), rule, remedy) from error


def _refuse_another_index(folder: Path, name: str) -> None:
    for other in sorted(folder.glob(f"*{INDEX}")):
        if other.name != f"{name}{INDEX}":
            rule = f"a folder is read by its index, and {other.name} is that of another model"
            raise WeightsError("folder", str(folder), rule, "save to a folder of its own")


def _named_by(index: Path) -> set[str]:
    """List the files of an index that stands; a broken one names none."""
    try:
        return set(map(str, read_json(index)["weight_map"].values()))
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _write_beside(folder: Path, writers: Mapping[str, Callable[[Path], Any]], ending: str) -> None:
    try:
        for file, write in writers.items():
            # Never into what is there: it may be another name of a file that an index names.
            (folder / f"{file}{ending}").unlink(missing_ok=True)
            write(folder / f"{file}{ending}")
    except BaseException:
        for file in writers:
            (folder / f"{file}{ending}").unlink(missing_ok=True)
        raise


def _switch(
    folder: Path,
    name: str,
    files: list[str],
    index: Mapping[str, Any] | None,
    ending: str,
    *,
    covered: bool,
) -> None:
    """Give the new files their names.

    Where the old index names the same files, an index of the files beside them comes first.
    """
    if index is None:
        (folder / f"{files[0]}{ending}").replace(folder / files[0])
        return
    if not covered:
        for file in files:
            (folder / f"{file}{ending}").replace(folder / file)
    else:
        where = {tensor: f"{file}{ending}" for tensor, file in index["weight_map"].items()}
        _put_index(folder / f"{name}{INDEX}", {**index, "weight_map": where})
        for file in files:
            _name_too(folder / f"{file}{ending}", folder / file, ENDINGS[ending == ENDINGS[0]])
    _put_index(folder / f"{name}{INDEX}", index)


def _name_too(path: Path, name: Path, ending: str) -> None:
    """Give a file a second name in place of what has it; where a file has but one, copy it."""
    beside = name.with_name(f"{name.name}{ending}")
    beside.unlink(missing_ok=True)
    try:
        os.link(path, beside)
    except OSError:
        shutil.copyfile(path, beside)
    beside.replace(name)


def _put_index(path: Path, index: Mapping[str, Any]) -> None:
    beside = path.with_name(f"{path.name}{ENDINGS[0]}")
    beside.write_text(json.dumps(index, indent=2) + "\n")
    beside.replace(path)


def _remove_earlier(folder: Path, name: str, kept: set[str]) -> None:
    """Remove files named as a save of that name names them, the index first."""
    ours = re.compile(
        rf"{re.escape(name)}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?(\.partial2?)?"
    )
    old = [
        f for f in folder.iterdir() if f.name not in kept and ours.fullmatch(f.name) and f.is_file()
    ]
    for file in sorted(old, key=lambda f: (f.suffix != ".json", f.name)):
        file.unlink()
