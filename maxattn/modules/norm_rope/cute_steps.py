"""What a thread of the CuTe kernels computes of its numbers, while a kernel is traced.

Each number is a value of CuTe's, and each list is gone through when the kernel is compiled. `Heads`
are the pairs of a thread's heads, one for each pass.
"""

from __future__ import annotations

from typing import Any

Pair = tuple[list[Any], list[Any]]
"""A thread's channels of one head: the first of each pair of the rotary embedding, the second."""
Heads = list[Pair]


def rotated(x: Heads, cos: list[Any] | None = None, sin: list[Any] | None = None) -> Heads:
    """Rotate each pair by its angle, where there are angles."""
    return x if cos is None or sin is None else [_turned(pair, cos, sin) for pair in x]


def _turned(pair: Pair, cos: list[Any], sin: list[Any]) -> Pair:
    parts = list(zip(*pair, cos, sin, strict=True))
    return [a * c - b * s for a, b, c, s in parts], [a * s + b * c for a, b, c, s in parts]


def plus(x: Heads, y: Heads | None) -> Heads:
    """Add, where there is something to add."""
    return x if y is None else [_sum(*each) for each in zip(x, y, strict=True)]


def times(x: Heads, y: Heads | None) -> Heads:
    """Multiply, where there is something to multiply by."""
    return x if y is None else products(x, y)


def products(x: Heads, y: Heads) -> Heads:
    """Multiply, number by number."""
    return [_product(*each) for each in zip(x, y, strict=True)]


def scaled(x: Heads, factors: list[Any]) -> Heads:
    """Multiply each head by its factor, where there are factors."""
    if not factors:
        return x
    return [
        ([e * factor for e in a], [e * factor for e in b])
        for (a, b), factor in zip(x, factors, strict=True)
    ]


def _product(x: Pair, y: Pair) -> Pair:
    first, second = ([a * b for a, b in zip(*each, strict=True)] for each in zip(x, y, strict=True))
    return first, second


def _sum(x: Pair, y: Pair) -> Pair:
    first, second = ([a + b for a, b in zip(*each, strict=True)] for each in zip(x, y, strict=True))
    return first, second


def total(numbers: list[Any]) -> Any:
    """Add numbers up in a tree: short chains of additions."""
    while len(numbers) > 1:
        odd = numbers[len(numbers) & ~1 :]
        numbers = [a + b for a, b in zip(numbers[::2], numbers[1::2], strict=False)] + odd
    return numbers[0]


def add_to(sums: list[list[Any]], found: Heads) -> None:
    """Add to sums that are kept in registers."""
    for both, pair in zip(sums, found, strict=True):
        for registers, numbers in zip(both, pair, strict=True):
            for j, x in enumerate(numbers):
                registers[j] = registers[j] + x


def less(g: Pair, z: Pair, slope: Any, r: Any) -> Pair:
    """Return (g - z slope) r."""
    first, second = (
        [(a - b * slope) * r for a, b in zip(mine, other, strict=True)]
        for mine, other in zip(g, z, strict=True)
    )
    return first, second
