"""The chosen columns of each row without a sort, against numpy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels.fa4 import block_sparse_lists, set_bits
from maxattn.kernels.fa4.block_sparse_lists import lists_of
from maxattn.masks import EMPTY, FULL, MIXED

SHAPES = [(1, 1), (5, 31), (4, 32), (7, 33), (2, 9, 64), (3, 257), (2, 2, 512), (3, 2048)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97, 1.0])
def test_every_chosen_column_is_found_once(shape: tuple[int, ...], share: float) -> None:
    chosen = np.random.default_rng(5).random(shape) < share
    with jax.numpy_rank_promotion("raise"):
        count, columns = map(np.asarray, jax.jit(set_bits.set_columns)(chosen))
    assert count.dtype == columns.dtype == np.int32
    assert (count == chosen.sum(axis=-1)).all()
    for at in np.ndindex(shape[:-1]):
        assert columns[at][: count[at]].tolist() == np.flatnonzero(chosen[at]).tolist()


@pytest.mark.parametrize("columns", [40, 32 * set_bits.MOST_WORDS, 32 * set_bits.MOST_WORDS + 1])
def test_lists_of_short_and_of_long_rows(columns: int) -> None:
    kinds = np.random.default_rng(6).choice(np.array([EMPTY, MIXED, FULL], np.int8), (3, columns))
    assert set_bits.fits(columns) is (columns <= 32 * set_bits.MOST_WORDS)
    found, want = lists_of(jnp.asarray(kinds)), lists_of(kinds)
    for count, at, n, places in zip(found[::2], found[1::2], want[::2], want[1::2], strict=True):
        assert (np.asarray(count) == n).all()
        for i in range(3):
            assert (np.asarray(at)[i, : n[i]] == places[i, : n[i]]).all()


def test_no_sort_is_made_of_short_rows() -> None:
    def text(columns: int) -> str:
        kinds = jax.ShapeDtypeStruct((4, columns), jnp.int8)
        return jax.jit(block_sparse_lists.lists_of).lower(kinds).as_text()

    assert "stablehlo.sort" not in text(256)
    assert "stablehlo.sort" in text(32 * set_bits.MOST_WORDS + 1)
