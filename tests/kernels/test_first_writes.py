"""FlashAttention-4's backward whose first tile of keys writes dQ: which calls, and how they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Grads, Rows
from maxattn.kernels.fa4 import backward_steps, first_writes, one_key_tile, whole_backward
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fa4.split_queries import SplitTail
from maxattn.kernels.fa4.tile_sizes import Tile
from maxattn.kernels.fused.rectangles import PieceInputs

FULL = M.Full()
H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))


def call_of(
    batch: int, t: int, s: int, heads: int = 12, head_dim: int = 128, mask: M.Mask = FULL
) -> ma.Call:
    return ma.Call(batch, t, s, heads, heads, head_dim, "bfloat16", mask.bind(t, s))


@pytest.mark.parametrize(
    ("call", "taken"),
    [
        (call_of(32, 1024, 1024), True),
        (call_of(2, 32760, 512), True),
        (call_of(8, 4096, 4096), True),
        (call_of(8, 4096, 4097), False),  # 33 tiles: the products take far longer than the zeros
        (call_of(2, 32760, 128), False),  # one tile, which has a kernel of its own
        (call_of(1, 1024, 1024, heads=5), False),  # to clear the flags would take longer
        (call_of(14, 226, 2112, heads=20, head_dim=96), False),  # few queries for 17 tiles
        (call_of(32, 1024, 1024, head_dim=160), True),
        (call_of(32, 1024, 1024, head_dim=256), True),
        (call_of(32, 1024, 1024, mask=M.Causal()), False),
    ],
)
def test_which_calls(call: ma.Call, taken: bool) -> None:
    assert first_writes.takes_call(call) is taken
    lines = ma.plan(call, ma.AttentionConfig(attention="flash"), target=H200).explain()
    assert ("the first tile of keys writes dQ" in lines) is taken


def test_the_plan_says_what_is_split() -> None:
    lines = ma.plan(call_of(1, 32760, 512), target=H200).explain()
    writes = "80x128 tiles; the first tile of keys writes dQ, others add to it"
    split = "the last 4 tiles of keys in 11 splits of the queries, so that fewer SMs wait"
    assert f"{writes}; {split}" in lines


def test_few_queries_have_their_tile_and_no_splits() -> None:
    few, many = (2, 128, 3, 128), (2, 4096, 3, 128)
    assert first_writes.tile_for(few) == Tile(64, 128)
    assert first_writes.tail_for(few, (2, 300, 3, 128), 132) is None
    assert first_writes.tile_for(many) == Tile(80, 128)
    assert first_writes.tail_for(many, (2, 300, 3, 128), 132) == SplitTail(3, 7)


@pytest.mark.parametrize(
    ("start", "splits", "shapes"),
    [
        (0, 1, [(2, 300, 3, 64)] * 2),
        (0, 4, [(8, 300, 3, 64)] * 2),
        (256, 4, [(2, 300, 3, 64)] * 2 + [(8, 44, 3, 64)] * 2),
    ],
)
def test_gradients_of_keys_whole_and_in_splits(
    start: int, splits: int, shapes: list[tuple[int, ...]]
) -> None:
    found = backward_steps.grads_of(jnp.zeros((2, 300, 3, 64)), start, splits)
    assert [x.shape for x in found] == shapes


@pytest.mark.parametrize(
    ("t", "s", "runs"),
    [(4096, 77, "one key tile"), (4096, 300, "first writes"), (4096, 5000, "the library's")],
)
def test_which_one_runs(t: int, s: int, runs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No GPU is here: shapes alone reach what launches."""
    ran: list[str] = []

    def named(name: str) -> Callable[..., Grads]:
        def run(inputs: PieceInputs, *_: Any) -> Grads:
            ran.append(name)
            return Grads(inputs.q, inputs.k, inputs.v)

        return run

    for module, known in ((first_writes, "knows_store"), (one_key_tile, "knows_launch")):
        monkeypatch.setattr(module, known, lambda: True)
        monkeypatch.setattr(module, "knows_rows", lambda: True)
    monkeypatch.setattr(first_writes, "takes_splits", lambda *_: True)
    monkeypatch.setattr(first_writes, "backward", named("first writes"))
    monkeypatch.setattr(one_key_tile, "backward", named("one key tile"))
    monkeypatch.setattr(whole_backward.split_queries, "backward", named("the library's"))
    q, k = (jnp.zeros((1, n, 12, 128), jnp.bfloat16) for n in (t, s))
    lse = jnp.zeros((1, 12, t), jnp.float32)
    kernel = Fa4(1.0, version="0.1.0", launched=True)
    kernel.piece_backward(PieceInputs.whole(q, k, k, None), Rows(q, lse, q, lse))
    assert ran == [runs]
    with_lengths = PieceInputs.whole(q, k, k, jnp.full(1, s, jnp.int32))
    if s == 77:
        kernel.piece_backward(with_lengths, Rows(q, lse, q, lse))
        assert ran == [runs] * 2
