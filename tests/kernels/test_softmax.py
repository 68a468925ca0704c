"""The merge of partial results by log-sum-exp, against float64."""

from __future__ import annotations

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels.softmax import merge_by_lse
from tests.reference import attention64, error


@pytest.mark.parametrize("cuts", [(), (40,), (0,), (77,), (7, 8, 61), (0, 20, 20, 77)])
@pytest.mark.parametrize("level", [0.0, 300.0])
def test_parts_are_merged_as_in_float64(cuts: tuple[int, ...], level: float) -> None:
    """A part without keys has NaN; exp overflows for scores of 300."""
    rng, bounds = np.random.default_rng(1), [0, *cuts, 77]
    q, k, v = (rng.normal(size=(2, length, 3, 8)) for length in (9, 77, 77))
    bias = np.full((1, 1, 1, 77), level)
    want, parts = attention64(q, k, v, bias=bias), []
    for a, b in pairwise(bounds):
        part = np.full((2, 9, 3, 8), np.nan), np.full((2, 3, 9), -np.inf)
        if b > a:
            part = attention64(q, k[:, a:b], v[:, a:b], bias=bias[..., a:b])[:2]
        parts.append([jnp.asarray(x, jnp.float32) for x in part])
    out, lse = jax.jit(merge_by_lse)(parts)
    assert out.dtype == lse.dtype == jnp.float32
    assert error(out, want.out) < 1e-6 + level * 2e-8 and error(lse, want.lse) < 1e-6


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_sees_nothing_anywhere_stays_so(parts: int) -> None:
    nothing = jnp.zeros((1, 2, 1, 4), "bfloat16"), jnp.full((1, 1, 2), -jnp.inf)
    out, lse = merge_by_lse([nothing] * parts)
    assert (out == 0).all() and (lse == -jnp.inf).all()
