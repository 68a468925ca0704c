"""A case: Python source that runs alone, and the checks of the names that it leaves."""

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
    """A result that a case may not give; `show` is Python that prints it."""

    def __init__(self, what: str, show: str = "") -> None:
        super().__init__(what)
        self.show = show


class Machine(NamedTuple):
    """What cases can use here; one seed draws one case on one machine."""

    platform: str
    devices: int
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """One thing to try.

    Args:
        source: Python that runs alone after `HEADER`.
        check: raises `Wrong` if the source left names that it should not leave.
        refused: the same, after one of maxattn's errors ended the source.
        never_refused: whether a refusal is a failure too.
        seconds: of processor time, the most that the source may take.
        name: `category:seed`, as `make fuzz CASE=` takes it.
    """

    source: str
    check: Check
    refused: Check = lambda names: None
    never_refused: bool = False
    seconds: float = 60.0
    name: str = ""


class Outcome(NamedTuple):
    """How a case ended; `kind` is "right", "refused", "failed" or "known"."""

    name: str
    kind: str
    what: str = ""  # the refusal or the fault
    snippet: str = ""  # Python that shows the fault
    letter: str = ""  # of a known fault
    seconds: float = 0.0
