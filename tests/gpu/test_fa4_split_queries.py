"""FlashAttention-4's backward over all pairs, whose last tiles, or all, are split over queries."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels.base import Grads, Rows
from maxattn.kernels.fa4 import backward_steps, launch, split_queries
from maxattn.kernels.fused.rectangles import PieceInputs
from tests.cases import judge
from tests.gpu.requirements import skip_unless_available
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu

# [B, T, S, N, H]: some tiles of keys, or all of them; batch rows; keys and queries that end within
# a tile.
CASES = [
    (1, 1500, 1530, 12, 128), (2, 700, 900, 11, 128), (1, 3000, 2000, 11, 40), (1, 900, 77, 5, 64),
    (3, 1000, 77, 5, 64), (1, 1111, 300, 4, 128), (2, 640, 129, 3, 96), (1, 800, 1, 2, 128),
]  # fmt: skip


def run(*x: jax.Array, scale: float) -> Grads:
    """Run the backward on q, k, v, out, lse, dout."""
    q, k, v, out, lse, dout = x
    rows = Rows(out, lse, dout, jnp.zeros_like(lse))
    return split_queries.backward(PieceInputs.whole(q, k, v, None), rows, scale)


def operands(
    batch: int, t: int, s: int, n: int, h: int, seed: int = 0, dtype: str = "bfloat16"
) -> tuple:
    rng = np.random.default_rng(seed)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(batch, x, n, h)), dtype) for x in (t, s, s, t))
    want = attention64(q, k, v, dout=dout)
    return (q, k, v, jnp.asarray(want.out, dtype), jnp.asarray(want.lse, jnp.float32), dout), want


@pytest.mark.parametrize("case", CASES, ids=lambda c: "x".join(map(str, c)))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_against_float64(case: tuple[int, ...], dtype: str) -> None:
    skip_unless_available("flash")
    known = backward_steps.library_has_launches() and launch.takes_splits(dtype, case[-1])
    assert known, "fa4-jax is not as it is looked for"
    x, want = operands(*case, dtype=dtype)
    assert split_queries.tail_for(x[0].shape, x[1].shape), "no tiles of this case are split"
    got = jax.jit(partial(run, scale=case[-1] ** -0.5))(*x)[:3]
    names, wanted = ("dq", "dk", "dv"), (want.dq, want.dk, want.dv)
    errors = {n: error(g, w) for n, g, w in zip(names, got, wanted, strict=True)}
    if (
        case[2] == 1
    ):  # of one key no score matters: dq and dk are 0, and what they have is rounding alone
        assert max(float(jnp.abs(x).max()) for x in got[:2]) < 1e-3
        errors = {"dv": errors["dv"]}
    judge({"dtype": dtype}, errors)


def test_the_last_keys_are_written_in_place() -> None:
    """A sum over tokens reads dV beside a matmul, as the gradient of a projection's bias does."""
    skip_unless_available("flash")
    x, _ = operands(1, 1500, 1530, 12, 128)
    tail = split_queries.tail_for(x[0].shape, x[1].shape)
    assert tail and tail.tiles * 128 < 1530, "all keys of this case are split"

    def program(w: jax.Array, *x: jax.Array) -> tuple:
        *rest, dv = run(*x, scale=128**-0.5)[:3]
        dv = dv.reshape(1530, 12 * 128)
        return *rest, dv @ w, dv.sum(0)

    w = jnp.ones((12 * 128, 64), jnp.bfloat16)
    text = jax.jit(program).lower(w, *x).compile().as_text() or ""
    assert "maxattn_backward_splits" in text
    assert not re.findall(r"= bf16\[(?:1,1530,12,128|1530,12,128|1530,1536)\]\S* copy\(.*", text)


def test_mapped_over() -> None:
    skip_unless_available("flash")
    made = [operands(1, 1500, 300, 12, 128, seed)[0] for seed in (0, 1)]
    of = partial(run, scale=128**-0.5)
    each = [jax.jit(of)(*x) for x in made]
    both = jax.jit(jax.vmap(of))(*(jnp.stack(x) for x in zip(*made, strict=True)))
    for i, want in enumerate(each):
        assert all(error(g[i], w) < 2e-2 for g, w in zip(both[:3], want[:3], strict=True))
