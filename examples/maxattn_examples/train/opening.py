"""Lines before a run's first step: plans of attention, and the checkpoint it goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax

import maxattn as ma

from .checkpoint import Checkpoints
from .settings import TrainingSettings


def opening(
    training: TrainingSettings, checkpoints: Checkpoints, plans: dict[str, ma.Plan]
) -> Iterator[str]:
    """Return the plans, the step that the run goes on from, and the changes since."""
    yield from (plan.explain() for plan in plans.values())
    done, wanted = checkpoints.step, training.steps
    if not done:
        yield f"training {wanted} steps from the start; checkpoints in {checkpoints.folder}"
        if checkpoints.replaced:
            last = checkpoints.replaced[-1]
            yield f"  those there, up to step {last}, are deleted when the first new one is whole"
        return
    if done >= wanted:
        yield f"training is complete: {done} of {wanted} steps in {checkpoints.folder}"
        yield "training.resume=false trains anew"
        return
    yield f"going on from step {done} of {wanted}, in {checkpoints.folder}"
    yield from _changes(checkpoints, wanted, plans)


def _changes(checkpoints: Checkpoints, steps: int, plans: dict[str, ma.Plan]) -> Iterator[str]:
    """Return the changes since the checkpoint was made."""
    before = checkpoints.facts["settings"]["training"]["steps"]
    if before != steps:
        follows = "a learning rate that depends on it follows the new one from here"
        yield f"  training.steps was {before}: {follows}"
    for role, plan in plans.items():
        earlier = checkpoints.facts["plans"].get(role)
        changes = ["it was not there"] if earlier is None else plan.diff(earlier)
        yield from (f"  {role}-attention changed: {line}" for line in changes)


def counted(trained: Any, fixed: Any) -> str:
    """Return how many parameters learn, and how many there are."""
    learn, rest = (sum(x.size for x in jax.tree.leaves(tree)) for tree in (trained, fixed))
    stay = f", {rest / 1e6:,.2f} million stay" if rest else ""
    return f"{learn / 1e6:,.2f} million parameters learn{stay}"
