"""Mutations of texts and bytes."""

from __future__ import annotations

import string
from random import Random

ODD = (
    "\x00",
    "\n",
    " ",
    "\t",
    "é",
    "٣",
    "{",
    "}",
    "[",
    "]",
    ":",
    "-",
    '"',
    "'",
    "&a",
    "*a",
    "!!int",
    "<<",
    "~",
    "#",
    "%",
    "=",
)


def mutated_text(rng: Random, text: str) -> str:
    """Change a text in one place: cut, repeat, drop, replace or insert."""
    at, end = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
    other = rng.choice([*ODD, rng.choice(string.printable), str(rng.randint(-5, 10**6))])
    return rng.choice(
        [text[:at], text[:at] + text[end:], text[:at] + other + text[at:],
         text[:at] + other + text[at + 1 :], text[:end] + text[at:end] + text[end:]]
    )  # fmt: skip


def mutated_bytes(rng: Random, data: bytes) -> bytes:
    """Change bytes in one place: cut at any byte, flip, drop, repeat, insert, or swap."""
    at, end = sorted((rng.randint(0, len(data)), rng.randint(0, len(data))))
    other = rng.choice([bytes([rng.randrange(256)]), b"\xff" * 8, b"\x00" * 8, rng.randbytes(4)])
    return rng.choice(
        [data[:at], data[at:], data[:at] + data[end:], data[:at] + other + data[at:],
         data[:at] + other + data[at + len(other) :], data[:end] + data[at:end] + data[end:],
         data + other]
    )  # fmt: skip
