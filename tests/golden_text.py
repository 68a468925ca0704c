"""Compare a text that users meet with its golden file; MAXATTN_REGOLD=1 rewrites the file."""

from __future__ import annotations

import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Fail unless `text` is what tests/golden/<name>.txt holds."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("MAXATTN_REGOLD") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.rstrip() + "\n")
    assert path.exists(), (
        f"{path} is missing: run the test with MAXATTN_REGOLD=1 and read what it writes"
    )
    assert text.rstrip() + "\n" == path.read_text()
