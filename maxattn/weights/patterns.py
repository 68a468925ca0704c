"""Matches the regular expressions of downloaded files in bounded time.

peft writes names of layers as regular expressions. Python's `re` tries every way to match one, and
a short expression can have more ways than there is time. Here a part of an expression maps the set
of places where it may begin to the set of those where it may end: sets are the bits of an integer.
What repeats runs until no place is new, and all steps are counted.

Taken are literals, `.`, escapes, classes, groups, alternatives, repetitions, `^` and `$`: what peft
and people write. Look-around, back references and flags are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from maxattn.config.numbers import whole_in

LONGEST: Final = 1000  # characters of an expression
DEEPEST: Final = 16  # groups inside of each other
MOST_REPEATS: Final = 1000
MOST_PATTERNS: Final = 10_000  # of a file
MOST_STEPS: Final = 5_000_000  # of all names against all expressions of a file: seconds
# Nothing repeats and nothing is an alternative: `re` takes each of them in one pass.
_PLAIN = re.compile(r"(?:[\w .:/-]|\\[.\-_/])+", re.ASCII)


class OutOfReach(ValueError):
    """Say why an expression is not matched here."""


@dataclass
class Budget:
    """Count the steps of all expressions of a file."""

    left: int = MOST_STEPS

    def take(self, steps: int) -> None:
        """Count steps.

        Raises:
            OutOfReach: there were too many.
        """
        self.left -= steps
        if self.left < 0:
            raise OutOfReach("its expressions take too long to match")


@dataclass
class Text:
    """Hold a text that is matched: places are bits, and the steps are counted."""

    text: str
    budget: Budget
    masks: dict[int, int] = field(default_factory=dict)

    def where(self, test: Test) -> int:
        """Return the places whose character passes a test."""
        if (found := self.masks.get(id(test))) is None:
            self.budget.take(len(self.text))
            found = sum(1 << i for i, char in enumerate(self.text) if test(char))
            self.masks[id(test)] = found
        return found


Test = Callable[[str], bool]
Step = Callable[[Text, int], int]
"""From the places where a part may begin to those where it may end."""


class Pattern:
    """One expression, matched against the end of names from a dot or their beginning on.

    It means what `re.match(rf"(.*\\.)?({expression})$", name)` means.

    Args:
        expression: as the file has it.

    Raises:
        OutOfReach: it is no expression, or one that is not taken.
    """

    def __init__(self, expression: str) -> None:
        if len(expression) > LONGEST:
            raise OutOfReach(f"it has more than {LONGEST} characters")
        is_plain = _PLAIN.fullmatch(expression)
        self._plain = re.compile(rf"(?:.*\.)?(?:{expression})$") if is_plain else None
        self._step = None if is_plain else _Parser(expression).parsed()

    def matches(self, name: str, budget: Budget) -> bool:
        """Say whether a name matches.

        Raises:
            OutOfReach: the steps are used up.
        """
        budget.take(1)
        if self._step is None:
            return self._plain is not None and self._plain.match(name) is not None
        text = Text(name, budget)
        begins = 1 | text.where(_is_dot) << 1
        return bool(self._step(text, begins) >> len(name) & 1)


def _is_dot(char: str) -> bool:
    return char == "."


# ---- parts of an expression ----------------------------------------------------------------------


def _one(test: Test) -> Step:
    """Match one character."""

    def step(text: Text, begins: int) -> int:
        text.budget.take(1)
        return (begins & text.where(test)) << 1

    return step


def _in_turn(steps: list[Step]) -> Step:
    def step(text: Text, begins: int) -> int:
        text.budget.take(1)
        for part in steps:
            begins = part(text, begins) if begins else 0
        return begins

    return step


def _any_of(steps: list[Step]) -> Step:
    def step(text: Text, begins: int) -> int:
        text.budget.take(1)
        ends = 0
        for part in steps:
            ends |= part(text, begins)
        return ends

    return step


def _repeated(part: Step, least: int, most: int | None) -> Step:
    def step(text: Text, begins: int) -> int:
        for _ in range(least):
            text.budget.take(1)
            begins = part(text, begins) if begins else 0
        ends = new = begins
        count = least
        while new and (most is None or count < most):
            text.budget.take(1)
            new = part(text, new) & ~ends
            ends |= new
            count += 1
        return ends

    return step


def _at_first(text: Text, begins: int) -> int:
    return begins & 1


def _at_last(text: Text, begins: int) -> int:
    return begins & 1 << len(text.text)


# ---- reading an expression -----------------------------------------------------------------------

_CLASSES: dict[str, Test] = {
    "d": lambda char: char.isdecimal(),
    "w": lambda char: char.isalnum() or char == "_",
    "s": lambda char: char.isspace(),
}
_CLASSES |= {
    "D": lambda char: not char.isdecimal(),
    "W": lambda char: not (char.isalnum() or char == "_"),
    "S": lambda char: not char.isspace(),
}
_REPEATS = re.compile(r"\{(\d*)(?:(,)(\d*))?\}", re.ASCII)


class _Parser:
    """Read an expression from left to right."""

    def __init__(self, expression: str) -> None:
        self.text, self.place, self.depth = expression, 0, 0

    def parsed(self) -> Step:
        """Return the step of the whole expression."""
        step = self._alternatives()
        if self._next():
            raise self._refused("a bracket that nothing opens")
        return step

    def _next(self, words: str = "") -> str:
        """Return the character that comes next, and pass it where it is one of `words`."""
        char = self.text[self.place : self.place + 1]
        if char and char in words:
            self.place += 1
        return char

    def _take(self) -> str:
        char = self._next()
        if not char:
            raise self._refused("its end, where more is expected")
        self.place += 1
        return char

    def _refused(self, what: str) -> OutOfReach:
        return OutOfReach(f"at character {self.place + 1} it has {what}")

    def _alternatives(self) -> Step:
        found = [self._sequence()]
        while self._next("|") == "|":
            found.append(self._sequence())
        return found[0] if len(found) == 1 else _any_of(found)

    def _sequence(self) -> Step:
        found: list[Step] = []
        while self._next() not in ("", "|", ")"):
            found.append(self._with_repeats(self._atom()))
        return _in_turn(found)

    def _with_repeats(self, part: Step) -> Step:
        bounds = self._bounds()
        if bounds is None:
            return part
        self._next("?")  # as few as it can: the same names match
        if self._next() in ("*", "+", "?") or self._bounds() is not None:
            raise self._refused("a repetition of a repetition")
        return _repeated(part, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if (char := self._next("*+?")) in simple:
            return simple[char]
        found = _REPEATS.match(self.text, self.place)
        if not found or not (found[1] or found[2]):
            return None  # a brace is a brace
        least, most = self._number(found[1], 0), self._number(found[3], None)
        most = most if found[2] else least
        if most is not None and most < least:
            raise self._refused("a repetition that is none")
        self.place = found.end()
        return least, most

    def _number(self, digits: str | None, other: Any) -> Any:
        number = whole_in(digits, 0, MOST_REPEATS) if digits else other
        if digits and number is None:
            raise self._refused(f"more than {MOST_REPEATS} repetitions")
        return number

    def _atom(self) -> Step:
        char = self._take()
        if char == "(":
            return self._group()
        if char == "[":
            return _one(self._class())
        if char == "\\":
            return _one(self._escape())
        if char == ".":
            return _one(lambda other: other != "\n")
        if char in "*+?":
            raise self._refused("a repetition of nothing")
        if char in "^$":
            return _at_first if char == "^" else _at_last
        return _one(char.__eq__)

    def _group(self) -> Step:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self._refused(f"groups more than {DEEPEST} deep")
        if self._next("?") == "?" and self._next(":") != ":":
            raise self._refused("a group of a kind that is not taken here")
        step = self._alternatives()
        if self._next(")") != ")":
            raise self._refused("a group that is not closed")
        self.depth -= 1
        return step

    def _escape(self) -> Test:
        char = self._take()
        if char in _CLASSES:
            return _CLASSES[char]
        if char.isalnum():
            raise self._refused(f"\\{char}, which is not taken here")
        return char.__eq__

    def _class(self) -> Test:
        is_other = self._next("^") == "^"
        tests: list[Test] = []
        while self._next() != "]" or not tests:
            tests.append(self._range())
        self.place += 1
        if is_other:
            return lambda char: not any(test(char) for test in tests)
        return lambda char: any(test(char) for test in tests)

    def _range(self) -> Test:
        first, test = self._one_of_class()
        follows = self.text[self.place : self.place + 2]
        if not (len(follows) == 2 and follows[0] == "-" and follows[1] != "]"):
            return test
        self.place += 1
        last, _ = self._one_of_class()
        if not first or not last or last < first:
            raise self._refused("a range that is none")
        return lambda char: first <= char <= last

    def _one_of_class(self) -> tuple[str, Test]:
        """Return a character of a class, or the test that an escape stands for."""
        char = self._take()
        if char != "\\":
            return char, char.__eq__
        named = self._next()
        test = self._escape()
        return "" if named in _CLASSES else named, test
