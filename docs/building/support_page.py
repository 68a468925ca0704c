"""The support matrix as Markdown: a tab for each machine, a number for each reason."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from itertools import groupby

from docs.building.support import (
    HARDWARE,
    Asked,
    Cell,
    cells,
    measured,
    rows,
    runs_as,
    target_of,
    title,
)
from maxattn import Reason, Target
from maxattn.kernels import KERNELS
from maxattn.kernels.table import EXTRAS


def text() -> str:
    """Return the tabs of all machines."""
    tabs = (f":::{{tab-item}} {name}\n{tab(name, kind)}\n:::" for name, kind in HARDWARE.items())
    packages = ", ".join(f"{name} {version}" for name, (_, version) in EXTRAS.items())
    return "\n".join([f"Packages: {packages}.", "", "::::{tab-set}", *tabs, "::::"])


def tab(name: str, kind: str) -> str:
    """Return what stands under the tab of one machine: kernels, table, reasons."""
    target, notes = target_of(kind), Notes(name)
    table = "\n".join(_table(target, notes))
    runs = (f"- {runs_as(kernel, target)}" for kernel in KERNELS)
    return "\n".join(
        [
            *runs,
            "",
            measured(target),
            "",
            f'<div class="support">\n{table}\n</div>',
            "",
            notes.html(),
        ]
    )


class Notes:
    """Number the reasons of one table, from 1, each once.

    Args:
        name: of the machine, which anchors begin with.
    """

    def __init__(self, name: str) -> None:
        self.anchor = "support-" + "-".join(re.findall(r"\w+", name.lower()))
        self.numbers: dict[str, int] = {}

    def link(self, reason: Reason) -> str:
        """Return "no" with the number of its reason, which also shows under a pointer."""
        number = self.numbers.setdefault(str(reason), len(self.numbers) + 1)
        link = f'<a href="#{self.anchor}-{number}">no<sup>{number}</sup></a>'
        return f'<td class="no" title="{escape(str(reason))}">{link}</td>'

    def html(self) -> str:
        """Return the reasons in a list."""
        items = (f'<li id="{self.anchor}-{n}">{escape(s)}</li>' for s, n in self.numbers.items())
        return f'<ol class="reasons">{"".join(items)}</ol>'


def _table(target: Target, notes: Notes) -> Iterator[str]:
    heads = "".join(f'<th scope="col">{_breakable(title(kernel))}</th>' for kernel in KERNELS)
    yield f'<table>\n<thead><tr><th scope="col"></th>{heads}</tr></thead>\n<tbody>'
    for group, asked in groupby(rows(), key=lambda row: row.group):
        yield f'<tr class="group"><th colspan="{len(KERNELS) + 1}">{group}</th></tr>'
        yield from (_row(each, cells(each, target), notes) for each in asked)
    yield "</tbody></table>"


def _row(asked: Asked, answers: tuple[Cell, ...], notes: Notes) -> str:
    marks = (
        '<td class="yes">yes</td>' if cell.reason is None else notes.link(cell.reason)
        for cell in answers
    )
    return f'<tr><th scope="row">{_code(asked.name)}</th>{"".join(marks)}</tr>'


def _code(words: str) -> str:
    """Return words as HTML, those in backticks as code."""
    parts = escape(words).split("`")
    return "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))


def _breakable(name: str) -> str:
    """Let a long name break behind its underscores."""
    return escape(name).replace("_", "_<wbr>")
