"""What a thread of the row kernel computes of its numbers, and sums over the threads of a block.

Each number is a value of CuTe's, and each Python list is gone through when the kernel is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from operator import add, mul
from typing import Any

from maxattn.modules.row_kernel.memory import HALF, Row, new_registers
from maxattn.modules.row_kernel.work import OCTET, WARP

cutlass: Any = import_module("cutlass")
cute: Any = import_module("cutlass.cute")


def each(f: Callable[..., Any], *rows: Row) -> Row:
    """Apply a function number by number."""
    return [
        [f(*numbers) for numbers in zip(*passes, strict=True)] for passes in zip(*rows, strict=True)
    ]


def plus(x: Row, y: Row | None) -> Row:
    return x if y is None else each(add, x, y)


def times(x: Row, y: Row | None) -> Row:
    return x if y is None else each(mul, x, y)


def rotated(style: str | None, row: Row, cos: Any = None, sin: Any = None) -> Row:
    """Rotate each pair by its angle, where there are angles."""
    if style is None:
        return row
    found = []
    for x in row:
        pairs = (x[:HALF], x[HALF:]) if style == "half" else (x[::2], x[1::2])
        parts = list(zip(*pairs, cos, sin, strict=True))
        first = [a * c - b * s for a, b, c, s in parts]
        second = [a * s + b * c for a, b, c, s in parts]
        joined = [x for pair in zip(first, second, strict=True) for x in pair]
        found.append(first + second if style == "half" else joined)
    return found


def total(numbers: list[Any]) -> Any:
    """Add numbers up in a tree: short chains of additions."""
    while len(numbers) > 1:
        odd = numbers[len(numbers) & ~1 :]
        numbers = [a + b for a, b in zip(numbers[::2], numbers[1::2], strict=False)] + odd
    return numbers[0]


def added_up(*numbers: Any) -> Any:
    return total(list(numbers))


def most(numbers: list[Any]) -> Any:
    found = cutlass.Int32(1)
    for x in numbers:
        found = cutlass.max(found, x)
    return found


def zeros(passes: int) -> list[Any]:
    found = [new_registers(OCTET, cutlass.Float32) for _ in range(passes)]
    for registers in found:
        registers.fill(0.0)
    return found


def add_to(added: dict[str, list[Any]], name: str, row: Callable[[], Row]) -> None:
    """Add to the sums of a vector, where there is one."""
    if name in added:
        for registers, numbers in zip(added[name], row(), strict=True):
            for i, x in enumerate(numbers):
                registers[i] = registers[i] + x


# ---- moments -------------------------------------------------------------------------------------


def over_roots(block: Any, z: Row, row: Any) -> Row:
    """Return r = 1 / sqrt(mean(z^2) + eps), by which an RMS norm multiplies each channel."""
    eps = block.place.work.eps
    roots = [cute.math.rsqrt(m[0] + eps, fastmath=True) for m in means(block, z, z, row)]
    return [[r] * OCTET for r in roots]


def means(block: Any, x: Row, y: Row, row: Any) -> Row:
    """Return the mean of x y over each head, or over the row."""
    work, products = block.place.work, each(mul, x, y)
    sums = [block.place.own(step, total(p)) for step, p in enumerate(products)]
    if work.norm == "head":
        found = [over_lanes(s, work.lanes) * (1.0 / work.head_dim) for s in sums]
        return [[m] * OCTET for m in found]
    parts = of_warps(block, [over_lanes(total(sums), WARP)], row)
    whole = total([part[0] for part in parts]) * (1.0 / work.channels)
    return [[whole] * OCTET] * work.passes


def layer_normed(block: Any, z: Row, row: Any) -> Row:
    """Return (z - mean) / sqrt(variance + eps), without loss where the mean is large.

    Each warp has its mean and the squares of distances from it, and these are merged as by Chan,
    Golub and LeVeque (1979).
    """
    work, place, one = block.place.work, block.place, cutlass.Float32(1.0)
    is_full, count = work.is_full, block.count
    count = count if is_full else cutlass.select_(count > 0.0, count, one)
    sums = [place.own(step, total(x)) for step, x in enumerate(z)]
    mean = over_lanes(total(sums), WARP) * (1.0 / count)
    apart = [[x - mean for x in numbers] for numbers in z]
    sums = [place.own(step, total(x)) for step, x in enumerate(each(mul, apart, apart))]
    parts = of_warps(block, [mean, over_lanes(total(sums), WARP)], row)
    counts = [work.of_warp(warp) for warp in range(work.warps)]
    merged = [(n, *part) for n, part in zip(counts, parts, strict=True) if n]
    mean = total([m * (n / work.channels) for n, m, _ in merged])
    squares = total([s + (m - mean) * (m - mean) * float(n) for n, m, s in merged])
    root = cute.math.rsqrt(squares * (1.0 / work.channels) + work.eps, fastmath=True)
    return [[(x - mean) * root for x in numbers] for numbers in z]


def over_lanes(x: Any, width: int) -> Any:
    """Sum over so many neighbouring threads."""
    for step in range(width.bit_length() - 1):
        x = x + cute.arch.shuffle_sync_bfly(x, offset=1 << step)
    return x


def of_warps(block: Any, numbers: list[Any], row: Any) -> list[list[Any]]:
    """Return the numbers of all warps of the block, once a row.

    Rows take turns with two sets, so that one barrier a row suffices.
    """
    warps, turn = block.place.work.warps, (row - block.first) % 2
    if warps == 1:
        return [numbers]
    for k, x in enumerate(numbers):
        # All threads of a warp store the same.
        block.shared[turn, k, cute.arch.warp_idx()] = x
    cute.arch.sync_threads()
    return [[block.shared[turn, k, w] for k in range(len(numbers))] for w in range(warps)]
