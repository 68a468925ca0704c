"""Compare texts for users with the golden files; MAXATTN_REGOLD=1 rewrites those that differ.

`tests/golden/<group>.txt` has the texts of a group, each below a heading `[name]`, sorted by name.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parent / "golden"
HEADING = re.compile(r"^\[(\w+)\]\n", re.MULTILINE)


def check_golden(name: str, text: str) -> None:
    """Fail unless `text` equals the golden text <group>/<name>."""
    group, _, name = name.rpartition("/")
    group, text = group.replace("/", "_"), text.rstrip()
    assert not HEADING.search(text + "\n"), "a line of the text reads as a heading"
    if os.environ.get("MAXATTN_REGOLD") == "1":
        _rewrite(group, name, text)
    found = golden_texts(group)
    assert name in found, (
        f"[{name}] is missing in tests/golden/{group}.txt: run the test with MAXATTN_REGOLD=1 and "
        "read what it writes"
    )
    assert text == found[name]


def check_refused(
    name: str, error: type[Exception], call: Callable[..., Any], *args: Any, **how: Any
) -> None:
    """Fail unless a call raises this error with the golden text."""
    with pytest.raises(error) as caught:
        call(*args, **how)
    check_golden(name, str(caught.value))


def golden_texts(group: str) -> dict[str, str]:
    """Return the texts of a group by name."""
    path = GOLDEN / f"{group}.txt"
    _, *parts = HEADING.split(path.read_text(encoding="utf-8")) if path.exists() else [""]
    return {name: text.rstrip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _rewrite(group: str, name: str, text: str) -> None:
    """Replace a text in its group's file, under a lock."""
    GOLDEN.mkdir(exist_ok=True)
    with (GOLDEN / f"{group}.txt").open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        texts = golden_texts(group) | {name: text}
        file.truncate(0)
        file.write("\n".join(f"[{n}]\n{t}\n" for n, t in sorted(texts.items())))
