"""Lengths up to ten million and beyond: an allowed call fits the codes that carry positions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.errors import InputError, Unsupported
from maxattn.kernels.splash import mask_codes

TPUS = ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e", "TPU v7x")
TOKAMAX = (("tokamax", "0.0.12"),)
VIDEO = M.VideoMask(2**10, 2**11, 2, window=3, sink=2)
LONG = 2**21


def call(t: int, s: int, mask: M.Mask) -> ma.Call:
    return ma.Call(1, t, s, 8, 8, 128, "bfloat16", mask)


def plan(asked: ma.Call, strategy: str, ranks: int = 8, kind: str = TPUS[2], **more: Any) -> Any:
    settings = {"attention": "flash", "context_parallel": strategy, **more}
    target = ma.Target.named(kind, TOKAMAX)
    return ma.plan(asked, ma.AttentionConfig(**settings), {"context": ranks}, target)


TWO_INTERVALS = {
    "video": VIDEO,
    "hole": ~M.LocalWindow(40, 20, 0),
    "either": M.BlockSlidingWindow(1024, 2) | M.KeyLimit(77),
    "hidden keys": ~(M.KeyLimit(90) & ~M.KeyLimit(60)),
}


@pytest.mark.parametrize("kernel", ["flash", "tokamax_flash"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses_ring"])
@pytest.mark.parametrize("name", TWO_INTERVALS)
def test_a_ring_refuses_what_its_codes_do_not_hold(name: str, strategy: str, kernel: str) -> None:
    asked = call(LONG, LONG, TWO_INTERVALS[name])
    with pytest.raises(Unsupported, match="at most 1048576 queries"):
        plan(asked, strategy, attention=kernel)
    allowed = plan(asked, strategy, fallback="warn", attention=kernel)
    assert allowed.kernel.name in ("memory_efficient", "dot_product") and allowed.fell_back


@pytest.mark.parametrize("kind", TPUS)
def test_auto_takes_another_kernel_in_such_a_ring(kind: str) -> None:
    for strategy in ("ring", "ulysses_ring"):
        made = plan(call(LONG, LONG, VIDEO), strategy, kind=kind, attention="auto")
        assert made.kernel.name == "memory_efficient"
        assert any("at most 1048576 queries" in reason.rule for reason in made.refused)


def test_padding_and_cross_lengths_are_counted() -> None:
    hole, most = ~M.LocalWindow(40, 20, 0), 2**20
    assert plan(call(most, most, hole), "ring").kernel.name == "flash"
    assert plan(call(most - 4, most - 4, hole), "ring", 7).kernel.name == "flash"  # 7 divides it
    for t, s, ranks in ((most - 1, most - 1, 7), (most + 1, 4096, 8), (2**21, 2**20, 4)):
        with pytest.raises(Unsupported, match="at most 1048576 queries"):
            plan(call(t, s, hole), "ring", ranks)


def test_what_a_plan_allows_is_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With position codes of 5 bits, calls that would give NaN in a ring are refused."""
    monkeypatch.setattr(mask_codes, "POSITION_BITS", 5)
    monkeypatch.setattr(mask_codes, "MOST_POSITIONS", 32)
    monkeypatch.setattr(mask_codes, "MOST_SHARDS", 2**26)
    mesh = ma.AttentionConfig(ici_context_parallelism=2).make_mesh(jax.devices()[:2])
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 64, 2, 16)), jnp.float32)
    mask = M.VideoMask(16, 4, 2, window=3, sink=1)
    config = ma.AttentionConfig(attention="flash", context_parallel="ring")
    with pytest.raises(Unsupported, match="at most 32 queries"):
        ma.attention(x, x, x, mask=mask, config=config, mesh=mesh)


@pytest.mark.parametrize("length", [2**29 + 1, 2**30, 2**31 - 1, 2**31, 10**12])
def test_positions_beyond_int32_are_refused(length: int) -> None:
    x, y = (jax.ShapeDtypeStruct((1, n, 8, 128), "bfloat16") for n in (length, 64))
    for q, k in ((x, x), (x, y), (y, x)):
        for mesh in (None, {"context": 8}):
            with pytest.raises(InputError, match="positions are int32"):
                ma.plan(ma.Call.of(q, k), mesh=mesh, target=ma.Target.named("NVIDIA H200"))


@pytest.mark.parametrize("mask", [M.Causal(1), VIDEO.bind(LONG, LONG), M.LocalWindow(3, 1, -9)])
def test_counts_of_rows_at_a_time_are_those_of_all(mask: M.Mask, monkeypatch: pytest.MonkeyPatch):
    whole = mask.block_map(7, 5, 100, 93), mask.allowed_pairs(100, 93)
    for rows in (1, 7, 8, 40, 99):
        monkeypatch.setattr("maxattn.masks.row_runs.ROWS", rows)
        np.testing.assert_array_equal(mask.block_map(7, 5, 100, 93), whole[0])
        assert mask.allowed_pairs(100, 93) == whole[1]
