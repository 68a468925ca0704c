"""Numbers of files and command lines: type, sign and size."""

from __future__ import annotations

import doctest
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxattn.config import numbers

NO_NUMBERS: list[Any] = [True, False, None, "5", 5.0, [5], nan, inf, b"5", np.bool_(True), 1j]


def test_the_examples():
    assert doctest.testmod(numbers).failed == 0 and doctest.testmod(numbers).attempted >= 4


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_whole_number(value: Any):
    assert numbers.whole(value) is None


@given(st.integers(-(10**40), 10**40), st.integers(-5, 5), st.integers(0, 2**40))
def test_whole_numbers_are_bounded(value: int, least: int, most: int):
    want = value if least <= value <= most else None
    assert numbers.whole(value, least, most) == want
    if value >= 0:
        assert numbers.whole_in(f" 00{value} ", least, most) == want


@given(st.text(max_size=5))
def test_text_is_a_number_where_it_is_digits_alone(text: str):
    got = numbers.whole_in(text, least=0)
    is_digits = text.strip().isascii() and text.strip().isdigit()
    assert got == (int(text.strip()) if is_digits else None)


@pytest.mark.parametrize("value", [10**400, -(10**400), nan, inf, -inf, True, "1.0", None, 1j])
def test_what_is_no_finite_number(value: Any):
    assert numbers.finite(value) is None


def test_finite_numbers():
    assert numbers.finite(np.float32(0.5)) == 0.5 and numbers.finite(np.int8(3), least=3) == 3.0
    assert numbers.finite(3, most=2) is None


@given(st.integers(1, 5000))
def test_divisors(number: int):
    assert numbers.divisors(number) == [n for n in range(1, number + 1) if number % n == 0][:64]
