"""Compares messages with the files of tests/golden/config; MAXATTN_REGOLD=1 rewrites them."""

from __future__ import annotations

import os
from pathlib import Path

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden" / "config"


def check(name: str, message: str) -> None:
    """Fail unless the message is the golden one, letter for letter."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("MAXATTN_REGOLD") == "1":
        path.write_text(message + "\n", encoding="utf-8")
    assert path.exists(), f"{path} is missing; MAXATTN_REGOLD=1 writes it"
    assert message + "\n" == path.read_text(encoding="utf-8")
