"""Gradients of queries that see nothing, on a Hopper GPU: zeros in place, whatever comes back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.fa4 import unseen_rows
from maxattn.kernels.fused import rectangles
from tests.cases import TOLERANCE
from tests.gpu.test_block_sparse_on_gpu import skip_without_block_sparse
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu

SHAPES = [  # batch, queries, heads, head dim
    (1, 8192, 4, 128),
    (3, 1001, 5, 72),
    (70, 33, 3, 256),
    (2, 2999, 2, 8),
    (1, 5, 7, 40),
]
SHARES = [0.0, 0.01, 0.6, 1.0]  # of queries that see nothing
FLASH = ma.AttentionConfig(attention="flash")


def rows(shape: tuple[int, ...], share: float, dtype: str) -> tuple[Any, Any]:
    b, t, n, _ = shape
    rng = np.random.default_rng(t)
    empty = rng.random((b, n, t)) < share
    dout = jnp.asarray(rng.standard_normal(shape), dtype)
    dout = jnp.where(rectangles.column(jnp.asarray(empty)), jnp.nan, dout)
    return dout.astype(dtype), jnp.asarray(np.where(empty, -np.inf, 1.0), jnp.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_that_see_nothing_are_0(shape: tuple[int, ...], share: float, dtype: str) -> None:
    skip_without_block_sparse()
    dout, lse = rows(shape, share, dtype)
    got = jax.jit(unseen_rows.cleared)(dout, lse)
    assert (got == rectangles.cleared(dout, lse)).all()
    assert jnp.isnan(dout).any() == (share > 0)  # what was given is as it was


def test_what_is_given_may_be_read_after_it() -> None:
    skip_without_block_sparse()
    dout, lse = rows((2, 3000, 4, 128), 0.5, "bfloat16")

    @jax.jit
    def both(dout: Any, lse: Any) -> Any:
        doubled = dout * 2
        return unseen_rows.cleared(doubled, lse), doubled

    got, doubled = both(dout, lse)
    assert (got == 2 * rectangles.cleared(dout, lse)).all()
    assert jnp.isnan(doubled).sum() == jnp.isnan(dout).sum()


@pytest.mark.parametrize("axis", [0, 1])
def test_slices(axis: int) -> None:
    """XLA hands a slice over where it lies: what is written to is an array of its own."""
    skip_without_block_sparse()
    dout, lse = rows((3, 2500, 4, 128), 0.2, "bfloat16")

    def cut(dout: Any, lse: Any) -> Any:
        return (dout[1:], lse[1:]) if axis == 0 else (dout[:1, 500:], lse[:1, :, 500:])

    @jax.jit
    def of_slices(dout: Any, lse: Any) -> Any:
        return unseen_rows.cleared(*cut(dout, lse)), dout

    got, given = of_slices(dout, lse)
    assert (got == rectangles.cleared(*cut(dout, lse))).all()
    assert jnp.isnan(given).sum() == jnp.isnan(dout).sum()


def test_under_vmap() -> None:
    skip_without_block_sparse()
    dout, lse = rows((6, 500, 4, 64), 0.3, "bfloat16")
    apart = dout.reshape(3, 2, *dout.shape[1:]), lse.reshape(3, 2, *lse.shape[1:])
    got = jax.vmap(unseen_rows.cleared)(*apart)
    assert (got.reshape(dout.shape) == rectangles.cleared(dout, lse)).all()


MASKS = {
    "padding": lambda ids: M.Segments(ids, ids),
    "causal": lambda ids: M.Causal() & M.Segments(ids, ids),
    "lengths": lambda ids: M.KeyPadding((ids >= 0).sum(axis=1) * jnp.array([1, 0])),
}


@pytest.mark.parametrize("name", MASKS)
def test_gradients_of_rows_that_see_nothing(name: str) -> None:
    """dout is NaN there; 2.4 million numbers, so that the kernel of its own runs."""
    skip_without_block_sparse()
    t, n, h = 2400, 4, 128
    tokens = np.arange(t)
    ids = np.stack([np.where(tokens < 1700, tokens // 500, -1), np.where(tokens < 1, 0, -1)])
    mask = MASKS[name](jnp.asarray(ids, jnp.int32)).bind(t, t)
    keys = jax.random.split(jax.random.key(3), 4)
    q, k, v, g = (jax.random.normal(key, (2, t, n, h), jnp.bfloat16) for key in keys)
    assert unseen_rows.pays(q)
    allowed = np.asarray(mask.allowed(np.arange(t), np.arange(t)))
    unseen = np.broadcast_to(~allowed.any(axis=-1), (2, 1, t))[:, 0, :, None, None]
    assert unseen.any()

    @jax.jit
    def both(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, vjp = jax.vjp(lambda *x: ma.attention(*x, mask=mask, config=FLASH), q, k, v)
        return out, *vjp(jnp.where(unseen, jnp.nan, g))

    want = attention64(q, k, v, allowed, dout=jnp.where(unseen, 0, g))
    exact = want.out, want.dq, want.dk, want.dv
    assert max(map(error, both(q, k, v, g), exact)) < TOLERANCE["bfloat16"]
