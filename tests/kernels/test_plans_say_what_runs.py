"""What a plan says of FlashAttention-4's launches is what is launched, of drawn calls.

Shapes alone are traced, and the functions that launch are exchanged for ones that write down what
they were given: no GPU is here.
"""

from __future__ import annotations

import random
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Grads, Inputs, Result, Rows
from maxattn.kernels.fa4 import (
    block_sparse,
    first_writes,
    kernel,
    key_lengths,
    one_key_tile,
    primitives,
    split_keys_forward,
    split_keys_lists,
    split_queries,
    unseen_rows,
)

H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),), capability="9.0")
CALLS = 800
Said = set[str]


def draw(rng: random.Random) -> tuple[ma.Call, M.Mask]:
    """Draw a call that `flash` takes."""
    while True:
        t, s = (int(10 ** rng.uniform(1.2, most)) for most in (4.0, 4.5))
        offset, kv_heads = rng.randint(-t, s), rng.choice((1, 2, 4, 8))
        window = rng.randint(0, max(t, s)), rng.randint(0, 200)
        ids = M.Segments(*(np.zeros((1, length), np.int32) for length in (t, s)))
        lengths = M.KeyPadding(np.full(1, s // 2 + 1))
        mask = rng.choice(
            (
                ids,
                ids & M.Causal(offset=offset),
                M.Full(),
                M.Causal(offset=None if t <= s else 0),
                M.Causal(offset=offset),
                M.LocalWindow(*window, offset=offset),
                M.LocalWindow(*window, offset=offset) & M.KeyPadding(np.ones((1, s), bool)),
                M.Causal(offset=offset) & lengths,
                lengths,
            )
        ).bind(t, s)
        heads = kv_heads * rng.choice((1, 1, 2, 4, 8))
        sizes = rng.choice((1, 1, 2, 3, 8)), t, s, heads, kv_heads
        head_dim = rng.choice((40, 64, 72, 96, 128, 136, 160, 192, 224, 256))
        batch = 1 if mask.has_data else sizes[0]
        call = ma.Call(batch, *sizes[1:], head_dim, "bfloat16", mask)
        if kernel.Fa4.supports(call, H200) is None:
            return call, mask


class Launches:
    """Write down what is launched, as a plan would say it.

    Attributes:
        said: of the pass that is traced.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.said: Said = set()
        for module in (split_keys_lists, kernel):
            patch.setattr(module, "knows_operands", lambda: True)
        for module in (kernel, first_writes, one_key_tile, key_lengths):
            patch.setattr(module, "knows_rows", lambda: True)
        patch.setattr(first_writes, "knows_store", lambda: True)
        patch.setattr(first_writes, "takes_splits", lambda *_: True)
        patch.setattr(one_key_tile, "knows_launch", lambda: True)
        patch.setattr(split_queries, "_can_split", lambda _: True)
        patch.setattr(split_keys_lists, "_in_splits", self.listed_forward)
        patch.setattr(block_sparse, "forward", self.listed_forward)
        patch.setattr(block_sparse, "backward", self.listed_backward)
        patch.setattr(split_keys_forward, "forward", self.tail_forward)
        patch.setattr(primitives, "fa4_forward", lambda inputs, *_: result_of(inputs.q))
        patch.setattr(primitives, "fa4_backward", lambda inputs, *_, **__: grads_of(inputs))
        patch.setattr(first_writes, "_backward", self.first_writes)
        patch.setattr(one_key_tile, "_backward", self.one_key_tile)
        patch.setattr(split_queries, "_in_splits", self.split_queries)
        patch.setattr(unseen_rows, "cleared", lambda dout, _: dout)

    def listed_forward(self, q: Any, k: Any, v: Any, tiles: Any, lengths: Any = None) -> Result:
        if tiles.lists is not None:
            self.said.add(f"lists of {tiles.tile.queries}x{tiles.tile.keys} tiles")
        order = block_sparse.spec_of(q, k, tiles, forward=True).order
        if tiles.splits > 1:
            self.said.add(f"in {tiles.splits} splits of the keys")
        elif order.persistent:
            self.said.add("persistent thread blocks")
        self.said |= {"take the next row"} if order.dynamic else set()
        return result_of(q)

    def tail_forward(self, inputs: Any, _: float, tail: Any) -> Result:
        self.said.add(tail.line)
        return result_of(inputs.q)

    def listed_backward(self, inputs: Any, _: Any, tiles: Any) -> Grads:
        listed = "lists of " if tiles.lists is not None else ""
        self.said.add(f"{listed}{tiles.tile.queries}x{tiles.tile.keys} tiles")
        self.split(tiles.splits)
        return grads_of(inputs)

    def first_writes(self, inputs: Any, _: Any, *, scale: float, sms: int) -> Grads:
        self.said.add("the first tile of keys writes dQ")
        tail = first_writes.tail_for(inputs.q.shape, inputs.k.shape, sms)
        self.said |= set() if tail is None else {tail.line}
        return grads_of(inputs)

    def one_key_tile(self, inputs: Any, _: Any, *, scale: float, sms: int) -> Grads:
        self.said.add("dQ is written once")
        self.split(one_key_tile.splits_for(inputs.q.shape, sms))
        return grads_of(inputs)

    def split_queries(self, operands: Any, _: float, tail: Any) -> Grads:
        self.said.add(tail.line)
        return Grads(*operands[:3])

    def split(self, splits: int) -> None:
        self.said |= {f"in {splits} splits of the queries"} if splits > 1 else set()


def result_of(q: Any) -> Result:
    return Result(q, jnp.zeros((q.shape[0], q.shape[2], q.shape[1]), jnp.float32))


def grads_of(inputs: Any) -> Grads:
    return Grads(inputs.q, inputs.k, inputs.v)


PARTS = re.compile(
    r"lists of \d+x\d+ tiles|in \d+ splits of the (?:keys|queries)|persistent thread blocks"
    r"|take the next row|dQ is written once|the first tile of keys writes dQ"
)


def agree(line: str, said: Said) -> bool:
    """Tell whether a plan's line has what was launched, and nothing of these kinds beside it."""
    launched = {part for each in said for part in PARTS.findall(each)}
    return all(part in line for part in said) and set(PARTS.findall(line)) == launched


@pytest.mark.parametrize("seed", range(4))
def test_of_drawn_calls(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, rng, found = Launches(monkeypatch), random.Random(seed), []
    for _ in range(CALLS // 4):
        call, mask = draw(rng)
        made = kernel.Fa4.build(call, ma.AttentionConfig(), H200)
        lines = made.lines(call)
        q, k = (
            jax.ShapeDtypeStruct((call.batch, length, heads, call.head_dim), "bfloat16")
            for length, heads in ((call.q_len, call.heads), (call.kv_len, call.kv_heads))
        )
        lse = jax.ShapeDtypeStruct((call.batch, call.heads, call.q_len), "float32")

        def forward(q: Any, k: Any, made: Any = made, mask: Any = mask) -> Any:
            return made.forward(Inputs(q, k, k, None, mask))

        def backward(q: Any, k: Any, lse: Any, made: Any = made, mask: Any = mask) -> Any:
            return made.backward(Inputs(q, k, k, None, mask), Rows(q, lse, q, lse))

        for run, line, given in (
            (forward, lines.blocks, (q, k)),
            (backward, lines.backward or lines.blocks, (q, k, lse)),
        ):
            launches.said = set()
            jax.eval_shape(run, *given)
            if not agree(line, launches.said):
                found.append((run.__name__, call, line, launches.said))
    assert not found, found[:3]
