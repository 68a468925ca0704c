"""FlashAttention-4's backwards over one tile of keys, and over several, against float64."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Grads
from maxattn.kernels.fa4 import first_writes
from tests.cases import judge
from tests.gpu.test_block_sparse_on_gpu import skip_without_block_sparse
from tests.gpu.test_forward_tiles_on_gpu import Case
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu
CONFIG = ma.AttentionConfig(attention="flash")


@pytest.fixture(autouse=True)
def small_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take backwards over several tiles of keys whose zeros are too few to count."""
    monkeypatch.setattr(first_writes, "LEAST", 0)
    monkeypatch.setattr(first_writes, "LEAST_OF_TILE", 0)


FLAGS = np.random.default_rng(5).random((3, 100)) < 0.5
CASES = [
    Case(t, s, h, heads=heads, dtype=dtype)
    for h, dtype in (
        (8, "bfloat16"),
        (40, "float16"),
        (64, "bfloat16"),
        (80, "bfloat16"),
        (96, "float16"),
        (112, "bfloat16"),
        (128, "bfloat16"),
    )
    for t, s, heads in ((1, 1, 3), (63, 64, 50), (700, 77, 3), (1025, 128, 5), (4100, 33, 1))
]
CASES += [
    Case(t, s, h, mask=M.KeyPadding(np.array(lengths, np.int32)))
    for h in (40, 64, 96, 128)
    for t, s, lengths in ((700, 77, (0, 77, 20)), (65, 128, (128, 1, 127)), (3000, 100, (9, 0, 0)))
]
CASES += [
    Case(700, 100, 128, mask=M.KeyPadding(FLAGS)),
    Case(30, 77, 64, 8, 2),
    Case(30, 77, 128, 8, 2, M.KeyPadding(np.array([0, 77, 20]))),
]


# Several tiles of keys: of all of which the queries are split, of the last ones, or of none.
CASES += [
    Case(t, s, h, heads=heads, dtype=dtype)
    for h, dtype in (
        (40, "float16"),
        (64, "bfloat16"),
        (72, "bfloat16"),
        (96, "float16"),
        (104, "bfloat16"),
        (128, "bfloat16"),
    )
    for t, s, heads in (
        (700, 129, 3),
        (60, 300, 50),
        (2000, 257, 2),
        (500, 512, 48),
        (1500, 1500, 5),
        (900, 4096, 2),
    )
]
CASES += [Case(200, 700, h, 8, 2) for h in (64, 128)]


def operands(case: Case) -> list[jax.Array]:
    rng, kv_heads = np.random.default_rng(7), case.kv_heads or case.heads
    sizes = (case.t, case.heads), (case.s, kv_heads), (case.s, kv_heads), (case.t, case.heads)
    arrays = (rng.normal(size=(3, *size, case.head_dim)) for size in sizes)
    return [jnp.asarray(x, case.dtype) for x in arrays]


def grads(case: Case, q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Grads:
    def call(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ma.attention(q, k, v, mask=case.mask, config=CONFIG)

    return Grads(*jax.vjp(call, q, k, v)[1](dout))


def check(case: Case, given: list[jax.Array], got: Grads) -> None:
    bound, (*qkv, dout) = case.mask.bind(case.t, case.s), given
    allowed = bound.allowed(np.arange(case.t), np.arange(case.s))
    want = attention64(*qkv, None if case.mask.is_full else np.asarray(allowed), dout=dout)
    errors = {n: error(getattr(got, n), getattr(want, n)) for n in ("dq", "dk", "dv")}
    judge({"dtype": case.dtype}, errors)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_float64(case: Case) -> None:
    skip_without_block_sparse()
    given = operands(case)
    check(case, given, jax.jit(partial(grads, case))(*given))


@pytest.mark.parametrize(
    "case", [Case(700, 77, 64), Case(300, 50, 128), Case(300, 500, 128, 30)], ids=str
)
def test_under_vmap(case: Case) -> None:
    skip_without_block_sparse()
    given = operands(case)
    both = [jnp.stack([x, x[::-1]]) for x in given]
    found = jax.jit(jax.vmap(partial(grads, case)))(*both)
    for n, flip in ((0, 1), (1, -1)):
        check(case, [x[::flip] for x in given], jax.tree.map(lambda x, n=n: x[n], found))


# One tile of keys; few queries, whose tiles of keys are several; few of both.
LOW = [Case(700, 77, 128), Case(128, 300, 128, 150), Case(60, 200, 64, 150), Case(50, 30, 64)]
LOW += [Case(700, 300, 128), Case(700, 77, 64, mask=M.KeyPadding(np.array([9, 77, 0])))]


@pytest.mark.parametrize("case", LOW, ids=str)
def test_scores_far_below_zero(case: Case) -> None:
    """A key past the last one has a score of 0: beside others of -200 its exponential is huge."""
    skip_without_block_sparse()
    q, k, v, dout = operands(case)
    given = [6 * jnp.abs(q), -6 * jnp.abs(k), v, dout]
    check(case, given, jax.jit(partial(grads, case))(*given))


@pytest.mark.parametrize("case", [Case(1100, 256, 128, 40), Case(4096, 200, 64, 60)], ids=str)
def test_the_second_tile_adds_to_what_the_first_has_written(case: Case) -> None:
    """A sum of two is the same in either order, but not where the first is written over it."""
    skip_without_block_sparse()
    given = operands(case)
    run = jax.jit(partial(grads, case))
    first = run(*given)
    check(case, given, first)
    for _ in range(40):
        assert (run(*given).dq == first.dq).all()
