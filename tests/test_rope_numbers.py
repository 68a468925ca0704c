"""Rotary tables of numbered frames, read on the host or traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.errors import InputError
from tests.golden_text import check_golden

SIDES = (2, 3)


def exact(numbers: Any) -> Any:
    """Compute e^(i angle) in float64, [T, H/2] of each row of frames."""
    pairs = [np.asarray([10_000.0 ** (-2 * i / c) for i in range(c // 2)]) for c in (44, 42, 42)]
    rows = []
    for f in np.asarray(numbers, np.float64):
        for y in range(SIDES[0]):
            for x in range(SIDES[1]):
                rows.append(np.concatenate([n * p for n, p in zip((f, y, x), pairs, strict=True)]))
    return np.exp(1j * np.asarray(rows))


def table(numbers: Any) -> ma.Rotary:
    return ma.rope_3d(128, numbers, *SIDES)


@pytest.mark.parametrize("first", [0, 250, 65_535, 100_000, 2_000_000, 2**31 - 4])
def test_traced_frames_are_exact_wherever_they_are(first: int) -> None:
    numbers = jnp.int32(first) + jnp.arange(3)
    got = jax.jit(table)(numbers)
    want = exact(np.asarray(numbers))
    np.testing.assert_allclose(got.cos + 1j * got.sin, want, atol=6e-7)


def test_frames_below_256_have_the_hosts_very_bits() -> None:
    got, want = jax.jit(table)(jnp.arange(200, 256)), table(256)
    for a, b in ((got.cos, want.cos), (got.sin, want.sin)):
        np.testing.assert_array_equal(a, b[200 * 6 :])


def test_numbers_that_are_read_are_those_of_a_count() -> None:
    for numbers in (np.arange(4, 7), jnp.arange(4, 7)):
        got, want = table(numbers), table(7)
        assert isinstance(got.cos, np.ndarray)
        np.testing.assert_array_equal(got.cos, want.cos[4 * 6 :])
        np.testing.assert_array_equal(got.sin, want.sin[4 * 6 :])


@pytest.mark.parametrize("make", [table, jax.jit(table)])
def test_rows_have_frames_of_their_own(make: Any) -> None:
    rows = np.asarray([[0, 1], [7, 30]])
    got = make(jnp.asarray(rows))
    assert got.cos.shape == (2, 12, 64)
    for row, numbers in enumerate(rows):
        want = exact(numbers)
        np.testing.assert_allclose(got.cos[row] + 1j * got.sin[row], want, atol=2e-7)


BAD = {
    "frames_of_floats": lambda: table(np.arange(3.0)),
    "frames_none": lambda: table(np.arange(0)),
    "frames_a_number": lambda: table(jnp.int32(3)),
    "frames_negative": lambda: table(np.asarray([-1, 0])),
    "frames_traced_floats": lambda: jax.jit(table)(jnp.arange(3.0)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_are_no_frames_is_refused(name: str) -> None:
    with pytest.raises(InputError) as caught:
        BAD[name]()
    check_golden(f"rope/{name}", str(caught.value))
