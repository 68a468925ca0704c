"""Tables of names side by side: maxattn's names are its arguments, the others' names are theirs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import pytest
from flax import nnx

import maxattn as ma
from tests.pages import text_of

PAGES = ("from_diffusers", "from_jax", "from_flax")
OTHERS: dict[str, Any] = {
    "jax.nn.dot_product_attention": jax.nn.dot_product_attention,
    "nnx.MultiHeadAttention(...)": nnx.MultiHeadAttention.__init__,
    "a call of nnx.MultiHeadAttention": nnx.MultiHeadAttention.__call__,
}
CODE, ARGUMENT = re.compile(r"`([^`]+)`"), re.compile(r"(\w+)=?.*")


class Row(NamedTuple):
    """A row of a table: the heads of both columns, and the cells."""

    theirs: str
    ours: str
    left: str
    right: str


def rows(page: str) -> Iterator[Row]:
    heads: list[str] | None = None
    for line in text_of(f"docs/guide/{page}.md").splitlines():
        if not line.startswith("|"):
            heads = None
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if heads is None:
            heads = [cell.replace("`", "") for cell in cells]
        elif not cells[0].startswith("-"):
            yield Row(*heads, *cells)


def arguments(function: Any) -> set[str]:
    made = function.__init__ if isinstance(function, type) else function
    return set(inspect.signature(made).parameters)


def ours(name: str) -> Any:
    """Return the object that a column's head names, such as `ma.attention`."""
    here: Any = ma
    for part in name.removeprefix("ma.").split("."):
        here = getattr(here, part)
    return here


EVERY = [(page, row) for page in PAGES for row in rows(page) if row.ours.startswith("ma.")]


@pytest.mark.parametrize("page", PAGES)
def test_maxattns_names_are_arguments(page: str) -> None:
    found = [row for its, row in EVERY if its == page]
    assert len(found) > 5
    for row in found:
        for code in CODE.findall(row.right):
            if re.fullmatch(r"\w+=.*", code):
                assert code.partition("=")[0] in arguments(ours(row.ours)), row


def test_other_librarys_names_are_theirs() -> None:
    checked = 0
    for _, row in EVERY:
        if row.theirs in OTHERS:
            names = [code.partition("=")[0] for code in CODE.findall(row.left)]
            assert set(names) <= arguments(OTHERS[row.theirs]), row
            checked += len(names)
    assert checked > 20
