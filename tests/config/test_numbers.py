"""Numbers in files and command lines: type, sign and size."""

from __future__ import annotations

import doctest
from math import inf, nan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxattn.config import numbers
from tests.tries import tries

NO_NUMBERS: list[Any] = [True, False, None, "5", [5], nan, inf, -inf, b"5", np.bool_(True), 1j]


def test_the_examples():
    assert doctest.testmod(numbers).failed == 0 and doctest.testmod(numbers).attempted >= 4


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_number(value: Any):
    assert numbers.whole(value) is None and numbers.whole(5.0) is None
    assert numbers.finite(value) is None and numbers.finite(10**400) is None


@tries(100)
@given(st.integers(-(10**40), 10**40), st.integers(-5, 5), st.integers(0, 2**40))
def test_whole_numbers_are_bounded(value: int, least: int, most: int):
    want = value if least <= value <= most else None
    assert numbers.whole(value, least, most) == want
    if value >= 0:
        assert numbers.whole_in(f" 00{value} ", least, most) == want


@tries(100)
@given(st.text(max_size=5))
def test_text_is_a_number_where_it_is_digits_alone(text: str):
    is_digits = text.strip().isascii() and text.strip().isdigit()
    assert numbers.whole_in(text, least=0) == (int(text.strip()) if is_digits else None)


def test_finite_numbers_and_divisors():
    assert numbers.finite(np.float32(0.5)) == 0.5 and numbers.finite(np.int8(3), least=3) == 3.0
    assert numbers.finite(3, most=2) is None
    for number in (1, 7, 360, 5000):
        assert numbers.divisors(number) == [n for n in range(1, number + 1) if number % n == 0][:64]
