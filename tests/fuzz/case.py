"""A case: Python source that runs by itself, and what must hold of the names that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Names = dict[str, Any]

HEADER = """\
import os
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
import jax
import jax.numpy as jnp
import numpy as np
import maxattn as ma
from maxattn import masks as M
"""


class Wrong(Exception):
    """Say what a case gave that it may not give, and a line of Python that shows it.

    Args:
        what: in a sentence.
        show: Python that prints it after the case's source.
    """

    def __init__(self, what: str, show: str = "") -> None:
        super().__init__(what)
        self.show = show


class Machine(NamedTuple):
    """Say what cases can use here: the same seed draws the same case on the same machine."""

    platform: str
    devices: int
    packages: tuple[str, ...]


def nothing_more(names: Names) -> None:
    """Hold nothing."""


@dataclass(frozen=True)
class Case:
    """Hold one thing to try.

    Args:
        category, seed: which draw this is.
        source: Python, whole: a snippet that runs alone after `HEADER`.
        check: raises `Wrong` for names that the source should not have left.
        refused: the same, after one of maxattn's errors ended the source.
        facts: what `known.py` tells cases apart by.
        never_refused: whether a refusal is a failure too.
        seconds: of processor time, the most that the source may take.
    """

    category: str
    seed: int
    source: str
    check: Callable[[Names], None] = nothing_more
    refused: Callable[[Names], None] = nothing_more
    facts: Mapping[str, Any] = field(default_factory=dict)
    never_refused: bool = False
    seconds: float = 60.0

    @property
    def name(self) -> str:
        """What `make fuzz CASE=` takes."""
        return f"{self.category}:{self.seed}"


class Outcome(NamedTuple):
    """Say how a case ended.

    Args:
        name: of the case.
        kind: "right", "refused", "failed" or "known".
        what: it did, for a refusal or a failure.
        snippet: Python that shows it, for a failure.
        letter: of the known fault.
        seconds: it took.
    """

    name: str
    kind: str
    what: str = ""
    snippet: str = ""
    letter: str = ""
    seconds: float = 0.0
