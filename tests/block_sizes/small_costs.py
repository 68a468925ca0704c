"""Step costs that are small enough to add up by hand, and plans that use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from maxattn.block_sizes.estimated import table
from maxattn.block_sizes.estimated.choose import estimated_sizes
from maxattn.block_sizes.estimated.step_cost import Costs, Evaluates, StepCost
from maxattn.block_sizes.estimated.table import ShippedCosts, group_name
from maxattn.decide import decide

KIND, HEAD_DIM = "TPU v6e", 128
CLOCK = 1.75e9


def cost(bundles: int, waits: int = 0, busy: int = 0, step_bytes: int = 0) -> StepCost:
    """Return the cost of a step that is equal with and without a mask."""
    body = 0.0, float(waits), float(busy)
    return StepCost(bundles, 0, body, body, 1, step_bytes, 0, 0)


def costs(
    small: int, large: int, waits: int = 0, fused: bool = False, interval: bool = False
) -> Costs:
    """Return costs of steps with tiles of 512 and of 1,024, the same for every kernel of a pass.

    Args:
        small, large: bundles.
        waits: cycles that a step waits.
        fused: of the fused backward.
        interval: of an interval of keys too.
    """
    backward = {"fused": 3} if fused else {"dkv": 3, "dq": 2}
    both = ((512, small), (1024, large))
    return {
        (kind, masked): {
            (side, side, side)[: 2 if kind == "dq" else 3]: cost(bundles, waits)
            for side, bundles in both
        }
        for kind in ("fwd", *backward)
        for masked in list(Evaluates)[: 2 + interval]
    }  # type: ignore[return-value]


def own_costs(bundles: int, online: int, side: int = 2048, interval: bool = False) -> Costs:
    """Return costs of `tpu_flash` with tiles of one size; `online` is for the other softmax."""
    found = {"fwd": bundles, "online": online, "fused": 2 * bundles}
    tile = side, side, 512
    every = ((kind, masked) for kind in found for masked in list(Evaluates)[: 2 + interval])
    return {(kind, m): {tile: cost(found[kind])} for kind, m in every}  # type: ignore[misc]


@contextmanager
def shipping(monkeypatch: pytest.MonkeyPatch, **kernels: Costs) -> Iterator[None]:
    """Replace the shipped table by these costs, for "TPU v6e" at head dim 128."""
    groups = {group_name(KIND, name, HEAD_DIM, "bfloat16"): c for name, c in kernels.items()}
    monkeypatch.setattr(table, "shipped", lambda: ShippedCosts("0.0.99", groups))
    monkeypatch.setattr(
        "maxattn.block_sizes.estimated.choose.shipped", lambda: ShippedCosts("0.0.99", groups)
    )
    for known in (estimated_sizes, decide):
        known.cache_clear()
    yield
    for known in (estimated_sizes, decide):
        known.cache_clear()
