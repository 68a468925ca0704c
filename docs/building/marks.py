"""Blocks as the site shows them: what their marks say."""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.transforms import SphinxTransform

MARK = re.compile(r"<!-- (needs: .+|output) -->\s*\Z")


class Marks(SphinxTransform):
    """Make `<!-- output -->` and `<!-- needs: ... -->` visible above their blocks."""

    default_priority = 400

    def apply(self, **kwargs: object) -> None:
        """Replace each such comment by a line of text."""
        for raw in list(self.document.findall(nodes.raw)):
            if mark := MARK.match(raw.astext()):
                words = "Output" if mark[1] == "output" else f"N{mark[1][1:]}"
                raw.replace_self(nodes.paragraph("", words, classes=["block-mark"]))
