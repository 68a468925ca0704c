"""FlashAttention-4's forward over all pairs, whose last queries, or all, take keys in splits."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.kernels.fa4 import split_keys_forward, split_keys_kernel
from maxattn.kernels.fa4.split_keys import KeySplits, split_for
from maxattn.kernels.fused.rectangles import PieceInputs
from tests.cases import judge
from tests.gpu.requirements import skip_unless_available
from tests.reference import Answer, attention64, error

pytestmark = pytest.mark.gpu


class Case(NamedTuple):
    """What is computed: shapes, how it is split, and real keys of each batch row."""

    shape: tuple[int, int, int, int]
    keys: int
    tail: KeySplits
    kv_heads: int = 0
    lengths: tuple[int, ...] | None = None
    dtype: str = "bfloat16"

    def operands(self, seed: int = 0) -> tuple[tuple[jax.Array, ...], Answer]:
        """Draw q, k, v, dout, and what they give in float64."""
        (b, t, n, h), rng = self.shape, np.random.default_rng(seed)
        sizes = (t, n), (self.keys, self.kv_heads or n), (self.keys, self.kv_heads or n), (t, n)
        x = tuple(jnp.asarray(rng.normal(size=(b, *size, h)), self.dtype) for size in sizes)
        real = np.array(self.lengths or [self.keys] * b)
        allowed = (np.arange(self.keys) < real[:, None])[:, None, None]
        return x, attention64(*x[:3], allowed, dout=x[3])


CASES = {
    "a tail": Case((1, 700, 3, 128), 3000, KeySplits(2, 5)),
    "all": Case((1, 150, 5, 128), 2000, KeySplits(2, 3)),
    "head dim 64": Case((2, 900, 4, 64), 1111, KeySplits(1, 4), kv_heads=2),
    "head dim 72": Case((1, 300, 4, 72), 1500, KeySplits(1, 2), dtype="float16"),
    "head dim 256": Case((1, 200, 2, 256), 900, KeySplits(1, 3)),
    "one query": Case((3, 1, 2, 128), 4097, KeySplits(1, 32)),
    "lengths": Case((3, 400, 4, 128), 1000, KeySplits(2, 4), 2, (1000, 1, 300)),
    "lengths of all": Case((2, 60, 4, 40), 1000, KeySplits(1, 6), lengths=(129, 999)),
}


def run(case: Case, *qkv: jax.Array) -> tuple[jax.Array, jax.Array]:
    lengths = None if case.lengths is None else jnp.asarray(case.lengths)
    found = split_keys_forward.forward(
        PieceInputs.whole(*qkv, lengths), case.shape[-1] ** -0.5, case.tail
    )
    return found.out, found.lse


@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str) -> None:
    skip_unless_available("flash")
    assert split_keys_kernel.knows_operands(), "fa4-jax is not as it is looked for"
    case = CASES[name]
    (q, k, v, _), want = case.operands()
    call = jax.jit(lambda *x: run(case, *x))
    out, lse = call(q, k, v)
    judge({"dtype": case.dtype}, {"out": error(out, want.out)})
    assert error(lse, want.lse) < 1e-4
    again = call(q, k, v)
    assert (again[0] == out).all() and (again[1] == lse).all(), "two runs differ"


@pytest.mark.parametrize("mask", [ma.masks.Full(), ma.masks.KeyPadding(np.array([2500]))], ids=str)
def test_gradients_of_a_call_that_is_split(mask: ma.masks.Mask) -> None:
    skip_unless_available("flash")
    shape, keys = (1, 260, 6, 128), 6000
    assert split_for(shape, (1, keys, 6, 128)), "no tiles of this call are split"
    (q, k, v, dout), _ = Case(shape, keys, KeySplits(1, 2)).operands()
    allowed = np.arange(keys) < (2500 if isinstance(mask, ma.masks.KeyPadding) else keys)
    want = attention64(q, k, v, allowed[None, None, None], dout=dout)
    config = ma.AttentionConfig(attention="flash")

    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ma.attention(q, k, v, mask=mask, config=config)

    out, back = jax.vjp(jax.jit(call), q, k, v)
    found = dict(zip(("dq", "dk", "dv"), jax.jit(back)(dout), strict=True))
    errors = {name: error(x, getattr(want, name)) for name, x in found.items()}
    judge({"dtype": "bfloat16"}, {"out": error(out, want.out), **errors})


def test_mapped_over() -> None:
    """The mapped axis becomes part of the batch, and so of the launch."""
    skip_unless_available("flash")
    case = Case((1, 200, 4, 64), 5000, KeySplits(1, 2))
    made = [case.operands(seed) for seed in (0, 1)]
    both = [jnp.stack(x) for x in zip(*(x[:3] for x, _ in made), strict=True)]
    assert split_for((2, *case.shape[1:]), (2, 5000, 4, 64)), "no tiles of this call are split"
    config = ma.AttentionConfig(attention="flash")
    found = jax.jit(jax.vmap(lambda q, k, v: ma.attention(q, k, v, config=config)))(*both)
    for out, (_, want) in zip(found, made, strict=True):
        judge({"dtype": "bfloat16"}, {"out": error(out, want.out)})


def test_the_last_queries_are_written_in_place() -> None:
    """A projection reads the output, and a sum of its rows beside it: neither copies it."""
    skip_unless_available("flash")
    case = Case((1, 700, 3, 128), 3000, KeySplits(2, 5))
    (q, k, v, _), _ = case.operands()

    def program(w: jax.Array, *x: jax.Array) -> tuple[jax.Array, ...]:
        out, lse = run(case, *x)
        return out.reshape(700, 3 * 128) @ w, out.sum(1), lse

    w = jnp.ones((3 * 128, 64), jnp.bfloat16)
    text = jax.jit(program).lower(w, q, k, v).compile().as_text() or ""
    assert "maxattn_forward_splits" in text
    assert not re.findall(r"= bf16\[(?:1,700,3,128|700,3,128|700,384)\]\S* copy\(.*", text)
