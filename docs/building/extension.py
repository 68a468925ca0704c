"""What the site has beside its pages: texts made of the code, and pages from outside of docs/.

A page asks for a text with a line `<!-- site: NAME -->`; `TEXTS` has a function for each name.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sphinx.pycode import ModuleAnalyzer

from docs.building import (
    block_size_rules,
    commands,
    links,
    marks,
    references,
    settings,
    support_page,
)

DOCS = Path(__file__).parents[1]
PLACE = re.compile(r"^<!-- site: ([\w.-]+) -->$", re.MULTILINE)
TEXTS: dict[str, Callable[[], str]] = {
    **{page: lambda page=page: links.text_of(page) for page in links.OUTSIDE},
    "commands": commands.text,
    "rules": block_size_rules.rules_table,
    "settings": settings.text,
    "step-settings": settings.of_steps,
    "support": support_page.text,
}


def filled(text: str) -> str:
    """Put the texts in the places of a page that ask for them."""
    return PLACE.sub(lambda found: TEXTS[found[1]](), text)


def read_source(app: Any, page: str, source: list[str]) -> None:
    """Let Sphinx read a page as the site shows it."""
    here = Path(app.env.doc2path(page)).resolve()
    source[0] = filled(links.relinked(source[0], here, here))


def forget_overloads(app: Any) -> None:
    """Let the API's pages show one signature of a function, that of its code."""
    analyzer = ModuleAnalyzer.for_module("maxattn._attention")
    analyzer.analyze()
    analyzer.overloads.clear()


def setup(app: Any) -> dict[str, Any]:
    """Register this as an extension of Sphinx."""
    app.connect("builder-inited", forget_overloads)
    app.connect("source-read", read_source)
    app.connect("autodoc-process-signature", references.signature)
    app.connect("missing-reference", references.find)
    for transform in (marks.Marks, references.Signatures, references.Words):
        app.add_transform(transform)
    return {"version": "1", "parallel_read_safe": False}
