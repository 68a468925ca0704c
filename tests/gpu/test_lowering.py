"""Masks in the forms of FlashAttention-4 and tokamax: bands, intervals and ids agree on pairs."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels.base import Inputs
from maxattn.kernels.fa4 import elsewhere
from maxattn.kernels.fa4.mask_test import PairTest
from maxattn.kernels.fa4.problem import of_inputs
from maxattn.kernels.fused import tokamax_mosaic
from maxattn.masks.terms import SplitMask, sort_terms, split_mask
from tests.cases import LENGTHS, MASKS, allowed

PAIRS = [name for name in MASKS if name not in ("full", "dense", "dense heads", "not segments")]
LONGEST = max(s for _, s in LENGTHS.values())
INTERVALS = ["causal", "window", "block window", "block causal", "causal & lengths", "rows empty"]


def inputs_of(name: str, length: str) -> Inputs:
    t, s = LENGTHS[length]
    q, k = jnp.zeros((3, t, 2, 8)), jnp.zeros((3, s, 2, 8))
    mask = MASKS[name](3, 2, t, s)
    assert mask is not None
    return Inputs(q, k, k, mask=mask.bind(t, s, 3, 2))


def wanted(inputs: Inputs) -> np.ndarray:
    t, s = inputs.q.shape[1], inputs.k.shape[1]
    ok = allowed(inputs.mask, t, s)
    assert ok is not None
    return np.broadcast_to(ok[:, 0], (3, t, s))


def inside(pairs: Any) -> Any:
    """Return which keys [M, T, S] are in each interval of each query."""
    key = np.arange(LONGEST)
    lo, hi = (np.asarray(end)[..., None] for end in (pairs.lo, pairs.hi))
    return np.logical_and(key >= lo, key < hi)


def in_band(left: int | None, right: int | None, t: int, s: int, move: int = 0) -> np.ndarray:
    apart = np.arange(s)[None] - np.arange(t)[:, None] - move
    ok = np.ones((t, s), bool) if left is None else apart >= -left
    return ok if right is None else ok & (apart <= right)


@pytest.mark.parametrize("length", ["64", "odd", "cross"])
@pytest.mark.parametrize("name", PAIRS)
def test_other_gpus_are_given_what_the_mask_allows(name: str, length: str, monkeypatch) -> None:
    """They get a window over queries and keys, and a test of pairs by intervals and ids."""
    inputs = inputs_of(name, length)
    if not isinstance(split_mask(inputs.mask), SplitMask):
        pytest.skip("not for FlashAttention-4")
    problem, want = of_inputs(inputs, 132), wanted(inputs)
    if problem.kind == "lengths":
        pytest.skip("the library takes lengths")
    tests: list[tuple[PairTest, Any]] = []
    keep = lambda *given: tests.append(given) or given[1]  # noqa: E731
    monkeypatch.setattr(elsewhere, "_pairs_mask", lambda: keep)
    view = elsewhere.view_of(problem, inputs)
    left, right = view.window
    assert (left is None or left >= 0) and (right is None or right >= 0)
    t, s = view.q1 - view.q0, view.k1 - view.k0
    got = np.zeros(want.shape, bool)
    # The library puts the last query at the last key.
    got[:, view.q0 : view.q1, view.k0 : view.k1] = in_band(left, right, t, s, move=s - t)
    b, q, kv = np.ogrid[tuple(map(slice, want.shape))]
    for test, arrays in tests:
        got &= test(b, q, kv, tuple(map(np.asarray, arrays)), np)
    assert (got == want).all()


@pytest.mark.parametrize("length", ["64", "odd", "cross"])
@pytest.mark.parametrize("name", INTERVALS)
def test_tokamax_gets_each_querys_interval(name: str, length: str) -> None:
    inputs = inputs_of(name, length)
    positions = tokamax_mosaic._positions(sort_terms(inputs.mask))
    if len(positions.intervals(np.zeros(1, np.int32))) > 1:
        pytest.skip("several intervals")
    want = wanted(inputs)
    ok = inside(tokamax_mosaic._intervals(inputs).lengths)[..., : want.shape[2]]
    assert (np.broadcast_to(ok, want.shape) == want).all()
