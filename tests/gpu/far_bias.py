"""Calls in half precision with a bias far from 0, in which some queries have few keys or none."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.cases import compare
from tests.reference import attention64


def drawn(t: int, s: int, h: int, dtype: str) -> tuple[Any, ...]:
    """Draw q, k, v, dout and a bias [1, 2, T, S]."""
    rng = np.random.default_rng(4)
    bias = jnp.asarray(rng.normal(size=(1, 2, t, s)) * 4, dtype)
    return *(jnp.asarray(rng.normal(size=(1, n, 2, h)), dtype) for n in (t, s, s, t)), bias


def judge(got: tuple[Any, ...], x: tuple[Any, ...], within: float) -> None:
    """Compare the output and the gradients of q, k, v and, if there is one, the bias."""
    *qkv, dout, bias = x
    exact = np.asarray(bias, np.float64)
    ok = np.isfinite(exact)
    want = attention64(*qkv, ok, np.where(ok, exact, 0.0), dout=dout)
    compare((got[0], None, *got[1:]), want, within)
    empty = ~ok.any((0, 1, 3))
    assert empty.any() and not np.asarray(got[0][:, empty]).any()
