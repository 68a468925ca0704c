"""How long a program's transfers take at the published rate of the links, one by one."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from maxattn.devices import Machine


class Passage(NamedTuple):
    """Hold one transfer of a compiled program.

    Args:
        kind, axes: what it is, and the mesh axes that it runs over.
        times: how often it runs.
        seconds: of one, at the published rate.
        kernels: names of the kernels that run while its data is under way.
    """

    kind: str
    axes: tuple[str, ...]
    times: int
    seconds: float
    kernels: tuple[str, ...]


def passage_of(found: Mapping[str, Any], machine: Machine, sizes: Mapping[str, int]) -> Passage:
    """Price a transfer as `Outcome.found` has it.

    Args:
        found: kind, axes, bytes that a device receives, times and kernels.
        machine: whose links.
        sizes: of the mesh's axes.
    """
    axes = tuple(found["axes"])
    seconds = found["bytes"] / _rate(found["kind"], machine, prod(sizes[a] for a in axes))
    return Passage(found["kind"], axes, found["times"], seconds, tuple(found["kernels"]))


def _rate(kind: str, machine: Machine, n: int) -> float:
    """Return bytes/s that a device receives; a sum's data goes around twice."""
    if kind == "ppermute" or n < 2:
        return machine.neighbour
    if kind in ("all_to_all", "ragged_all_to_all"):
        return machine.exchanged(n)
    return machine.gathered(n) / 2 if kind == "psum" else machine.gathered(n)
