"""Read the pages: README.md and docs/, their fenced blocks, and the comments that mark blocks.

A block is run (`python`, `sh`, and the cells of notebooks), loaded (`yaml`), or only shown (`text`,
and sources of the site's API). A comment in the line before its fence marks a block:

    <!-- needs: an NVIDIA GPU -->   it is not run here, and why
    <!-- output -->                 the output of the block before; `...` matches any text
    <!-- site: support -->          not a block: the site inserts a text of docs/building/ here
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^```(\w*|\{[\w-]+\})(?: ipython3)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {"{code-cell}": "python"}
BUILT = "_build"  # what `make docs` writes, not pages
MARK = re.compile(r"<!-- (needs: .+|output) -->\n\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page.

    Args:
        page: the path of the page from the root of the repository.
        line: the line of its fence, from 1.
        language: the word after the opening fence.
        text: the lines between the fences.
        mark: the text of the comment before the fence, or "".
    """

    page: str
    line: int
    language: str
    text: str
    mark: str

    @property
    def where(self) -> str:
        """The place of the block, such as `README.md:12`."""
        return f"{self.page}:{self.line}"


def pages() -> tuple[str, ...]:
    """List README.md and every page of docs/, as paths from the root."""
    found = (path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))
    return ("README.md", *sorted(str(path) for path in found if BUILT not in path.parts))


def text_of(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str) -> Iterator[Block]:
    """Yield the fenced blocks of a page, from its top."""
    text = text_of(page)
    for found in FENCE.finditer(text):
        before = text[: found.start()]
        mark = MARK.search(before)
        line = before.count("\n") + 1
        language = LANGUAGES.get(found[1], found[1])
        yield Block(page, line, language, found[2], mark[1] if mark else "")


def lines_outside_of_fences(page: str) -> Iterator[tuple[int, str]]:
    """Yield (number, line) for the lines of a page outside of fenced blocks."""
    inside = False
    for number, line in enumerate(text_of(page).splitlines(), 1):
        fence = line.startswith("```")
        if not (inside or fence):
            yield number, line
        inside ^= fence
