"""A case: Python source that runs alone, and checks of the names that it defines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

Names = dict[str, Any]
Check = Callable[[Names], None]

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
    """A wrong result of a case; `show` is Python that prints it."""

    def __init__(self, what: str, show: str = "") -> None:
        super().__init__(what)
        self.show = show


class Machine(NamedTuple):
    """The devices and packages that cases can use; they and a seed determine a case."""

    platform: str
    devices: int
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """One thing to try.

    Args:
        source: Python that runs alone after `HEADER`.
        check: raises `Wrong` if names that the source defined have wrong values.
        refused: the same, if the source ended with one of maxattn's errors.
        never_refused: whether such an error is a failure too.
        seconds: limit of processor time for the source.
        name: `category:seed`, for `make fuzz CASE=`.
    """

    source: str
    check: Check
    refused: Check = lambda names: None
    never_refused: bool = False
    seconds: float = 60.0
    name: str = ""


class Outcome(NamedTuple):
    """The result of a case; `kind` is "right", "refused", "failed" or "known"."""

    name: str
    kind: str
    what: str = ""  # the refusal or the fault
    snippet: str = ""  # Python that shows the fault
    letter: str = ""  # of a known fault
    seconds: float = 0.0
