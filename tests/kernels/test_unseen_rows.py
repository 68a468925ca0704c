"""Which gradients of queries that see nothing are made 0 in place."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from maxattn.kernels.fa4 import unseen_rows
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fused import rectangles

LONG, SHORT = (2, 4096, 4, 64), (2, 4095, 4, 64)


@pytest.mark.parametrize(
    ("launched", "shape", "in_place"),
    [(True, LONG, True), (True, SHORT, False), (False, LONG, False)],
)
def test_large_ones_are_cleared_in_place(
    launched: bool, shape: tuple[int, ...], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(unseen_rows, "cleared", lambda *x: given.append(x) or x[0])
    dout, lse = jnp.full(shape, jnp.nan, jnp.bfloat16), jnp.ones((2, 4, shape[1]))
    lse = lse.at[1, 2, 5].set(-jnp.inf)
    got = Fa4(1.0, launched=launched).clear(dout, lse)
    assert bool(given) is in_place
    if not in_place:
        assert got.dtype == dout.dtype
        assert (got[1, 5, 2] == 0).all()
        assert jnp.isnan(got).sum() == dout.size - 64


def test_rows_that_see_nothing_here_are_cleared_as_the_kernel_does() -> None:
    """A rectangle whose queries see nothing of it hands over an LSE that says so."""
    q = jnp.ones((2, 4, 1, 8))
    inputs = rectangles.PieceInputs.whole(q, q, q, jnp.array([3, 0]))
    given: list[Any] = []

    def clear(dout: Any, lse: Any) -> Any:
        given.append(lse)
        return rectangles.cleared(dout, lse)

    lse = jnp.zeros((2, 1, 4)).at[0, 0, 2].set(-jnp.inf)
    rows = rectangles.Rows(q, lse, q, jnp.ones((2, 1, 4)))
    got = rectangles.without_unseen(inputs, rows, clear)
    empty = jnp.array([[[False, False, True, False]], [[True] * 4]])
    assert ((given[0] == -jnp.inf) == empty).all()
    assert ((got.dout == 0) == rectangles.column(empty)).all()
    assert ((got.dlse == 0) == empty).all()
    assert jnp.isfinite(got.lse).all()
