"""FlashAttention-4's backward over keys that are one tile: which calls, its splits, its cost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.fa4 import backward_splits, one_key_tile
from maxattn.kernels.fa4.tile_sizes import Tile

FULL = M.Full()
H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))


def call_of(
    t: int, s: int, mask: M.Mask = FULL, heads: int = 8, kv_heads: int = 8, head_dim: int = 128
) -> ma.Call:
    return ma.Call(2, t, s, heads, kv_heads, head_dim, "bfloat16", mask.bind(t, s))


def backward_line(call: ma.Call) -> str:
    lines = ma.plan(call, ma.AttentionConfig(attention="flash"), target=H200).explain()
    return next(x for x in lines.splitlines() if "backward: " in x)


@pytest.mark.parametrize(
    ("call", "taken"),
    [
        (call_of(4096, 77), True),
        (call_of(4096, 128), True),
        (call_of(4096, 129), False),
        (call_of(4096, 77, M.KeyPadding(np.array([9, 77]))), True),
        (call_of(4096, 77, M.Causal(0)), False),
        (call_of(4096, 77, heads=8, kv_heads=2), False),  # whose sums are float32
        (call_of(30, 77, heads=8, kv_heads=2), False),  # folded first
        (call_of(4096, 77, head_dim=160), True),
        (call_of(4096, 97, head_dim=192), False),  # whose tiles have 96 keys
        (call_of(4096, 64, head_dim=256), False),
        (call_of(4096, 77, head_dim=36), True),  # as 40
    ],
)
def test_which_calls(call: ma.Call, taken: bool) -> None:
    assert one_key_tile.takes_call(call) is taken
    assert ("dQ is written once" in backward_line(call)) is (taken or call.q_len == 30)


def test_the_plan_says_how_it_is_split() -> None:
    split = (
        "64x128 tiles; the keys are one tile, and dQ is written once, in 8 splits of the queries"
    )
    assert split in backward_line(call_of(4096, 77))
    assert "128x128 tiles; the keys are one tile" in backward_line(call_of(4096, 77, head_dim=64))
    assert "64x128 tiles; the keys are one tile" in backward_line(call_of(60, 77, head_dim=64))
    folded = call_of(30, 77, M.KeyPadding(np.array([9, 77])), heads=8, kv_heads=2)
    assert backward_line(folded).endswith(
        "dQ is written once; the 4 query heads of a key head as rows of one"
    )


@pytest.mark.parametrize(("batch", "heads", "t", "splits"), [(1, 1, 64, 1), (1, 12, 32760, 11)])
def test_splits_leave_few_sms_waiting(batch: int, heads: int, t: int, splits: int) -> None:
    """12 heads in 11 splits are 132 thread blocks, one for each SM."""
    assert one_key_tile.splits_for((batch, t, heads, 128), 132) == splits
    call = replace(call_of(t, 77, heads=heads, kv_heads=heads), batch=batch)
    assert backward_splits.is_split(call, 132) is (splits > 1)


def test_tiles() -> None:
    assert one_key_tile.tile_for((1, 4096, 8, 64)) == Tile(128, 128)
    assert one_key_tile.tile_for((1, 4096, 8, 128)) == Tile(64, 128)
    assert one_key_tile.tile_for((1, 64, 8, 64)) == Tile(64, 128)
