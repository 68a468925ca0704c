"""What memory an estimate counts where a head of the values has other channels than one of q."""

from __future__ import annotations

import pytest

import maxattn as ma
from maxattn.tools.memory import estimate


def parts(head_dim: int, value_dim: int, strategy: str) -> dict[str, int]:
    sizes = 2, 4096, 4096, 8, 4, head_dim
    call = ma.Call(*sizes, dtype="bfloat16", value_head_dim=value_dim)
    config = ma.AttentionConfig(attention="dot_product", context_parallel=strategy)  # type: ignore[arg-type]
    plan = ma.plan(call, config, {"context": 4}, ma.Target.named("cpu"))
    assert plan.strategy.name == strategy
    return {part.what: part.bytes for part in estimate(plan, True)}


@pytest.mark.parametrize("strategy", ["all_gather", "ring"])
def test_values_are_counted_by_their_own_channels(strategy: str) -> None:
    """In training each part has as many arrays of H channels as of V."""
    narrow, wide = (parts(dim, dim, strategy) for dim in (32, 128))
    mixed, turned = parts(128, 32, strategy), parts(32, 128, strategy)
    assert len(mixed) >= 4
    for what, size in mixed.items():
        assert 2 * size == narrow[what] + wide[what] == 2 * turned[what], what
