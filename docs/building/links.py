"""Pages that stand outside of docs/, and links that lead to the site's page of a file."""

from __future__ import annotations

import os
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The file, and the page of docs/ that shows it.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
MEASURED = ROOT / "docs" / "measured"  # no pages of the site: its files are downloads
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")


def text_of(name: str) -> str:
    """Return the text of a file outside of docs/, its links as its page needs them.

    Args:
        name: of `OUTSIDE`.
    """
    file, page = ROOT / name, ROOT / "docs" / OUTSIDE[name]
    return relinked(file.read_text(encoding="utf-8"), file, page)


def relinked(text: str, file: Path, page: Path) -> str:
    """Return a text whose relative links lead from a page where they led from its file.

    Args:
        text: Markdown.
        file: where it stands.
        page: which page of the site shows it.
    """

    def moved(link: re.Match[str]) -> str:
        target = shown((file.parent / link[2]).resolve())
        as_file = "path:" if target.is_relative_to(MEASURED) else ""
        return f"{link[1]}{as_file}{os.path.relpath(target, page.parent)}{link[3]}"

    parts = FENCED.split(text)
    return "".join(part if i % 2 else LINK.sub(moved, part) for i, part in enumerate(parts))


def shown(file: Path) -> Path:
    """Return the page that shows a file, or the file itself."""
    name = str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else ""
    return ROOT / "docs" / OUTSIDE[name] if name in OUTSIDE else file
