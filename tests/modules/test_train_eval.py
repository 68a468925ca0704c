"""Dropout is on until `eval()`, as in NNX; a call's `deterministic` takes precedence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import InputError

X = np.random.default_rng(0).standard_normal((2, 5, 12)).astype(np.float32)
SIZES: dict[str, Any] = {"query_dim": 12, "heads": 2, "dim_head": 4, "dropout": 0.5}
KINDS: dict[str, Callable[..., Any]] = {
    "self": ma.FlaxAttention, "cross": ma.CrossAttention, "joint": ma.JointAttention,
}  # fmt: skip


class Block(nnx.Module):
    """A module that passes no dropout settings to the attention inside it."""

    def __init__(self, kind: str) -> None:
        self.kind, self.attn = kind, KINDS[kind](**SIZES, rngs=nnx.Rngs(0))

    def __call__(self, x: Any, rngs: Any = None, **how: Any) -> Any:
        states = (x,) if self.kind == "self" else (x, x)
        y = self.attn(*states, rngs=rngs, **how)
        return y[0] if self.kind == "joint" else y


def zeros(y: Any) -> int:
    return int((np.asarray(y) == 0).sum())


def seed() -> nnx.Rngs:
    return nnx.Rngs(dropout=1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_modules_state_decides_where_the_call_does_not(kind: str) -> None:
    block = Block(kind)
    fresh = block(X, deterministic=True)
    assert zeros(fresh) == 0
    dropped = block(X, seed())  # neither train() nor eval() was called
    assert zeros(dropped) > 20
    with pytest.raises(InputError, match=r"unless eval\(\) was called"):
        block(X)
    block.train()
    np.testing.assert_array_equal(dropped, block(X, seed()))
    np.testing.assert_array_equal(dropped, block(X, seed(), deterministic=False))
    np.testing.assert_array_equal(block(X, deterministic=True), fresh)
    with pytest.raises(InputError, match=r"unless eval\(\) was called"):
        block(X)
    block.eval()
    np.testing.assert_array_equal(block(X), fresh)
    assert zeros(block(X, seed(), deterministic=False)) == zeros(dropped)


def test_it_goes_through_jit_split_and_merge() -> None:
    block = Block("self")
    call = nnx.jit(lambda m, rngs: m(X, rngs))
    names = [path for path, _ in nnx.to_flat_state(nnx.state(block))]
    block.eval()
    assert zeros(call(block, seed())) == 0
    block.train()
    assert zeros(call(block, seed())) > 20
    assert [path for path, _ in nnx.to_flat_state(nnx.state(block))] == names
    assert zeros(nnx.merge(*nnx.split(block))(X, seed())) == zeros(block(X, seed()))
    block.eval()
    assert zeros(call(block, seed())) == zeros(nnx.merge(*nnx.split(block))(X)) == 0


def test_a_source_is_a_stream_a_key_or_the_dropouts_own() -> None:
    module = Block("self").attn
    module.train()
    sources = (nnx.Rngs(0), nnx.Rngs(0).dropout, jax.random.key(0))
    assert all(zeros(module(X, rngs=rngs)) > 20 for rngs in sources)
    module.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    assert zeros(module(X)) > 20
    module.dropout = nnx.Dropout(0.0)  # draws nothing
    np.testing.assert_array_equal(module(X), module(X, deterministic=True))
