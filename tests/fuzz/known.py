"""Faults that are known and not yet mended: counted apart, never hidden.

Empty this list as they are mended; what comes back is then a failure again.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tests.fuzz.case import Case


class Known(NamedTuple):
    """Name a fault.

    Args:
        letter: of the list of faults.
        category: a pattern of the categories where it shows.
        what: a pattern of what the case did.
        facts: what the case was about: names and patterns of their values.
        reason: the fault, in a sentence.
    """

    letter: str
    category: str
    what: str
    facts: dict[str, str]
    reason: str


KNOWN: tuple[Known, ...] = ()


def letter_of(case: Case, what: str) -> str:
    """Return the letter of the known fault that a failure is, or nothing."""
    return next((known.letter for known in KNOWN if _is(known, case, what)), "")


def _is(known: Known, case: Case, what: str) -> bool:
    facts = all(re.search(value, _fact(case, names)) for names, value in known.facts.items())
    return bool(
        facts and re.fullmatch(known.category, case.category) and re.search(known.what, what)
    )


def _fact(case: Case, names: str) -> str:
    """Return a fact of a case; of `a|b`, the one that there is."""
    return next((str(case.facts[name]) for name in names.split("|") if name in case.facts), "")
