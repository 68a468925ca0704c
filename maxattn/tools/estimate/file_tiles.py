"""The tiles that a kernel of a user's file visits: given, or counted from a mask.

The tile is read from the blocks of the kernel's first two operands, which must be Q and K.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from maxattn.errors import Unsupported
from maxattn.masks import FULL, MIXED
from maxattn.tools.estimate.bundles import Window
from maxattn.tools.estimate.kernel import KernelDump, KernelTiles
from maxattn.tools.model_shapes import Shape


class _TokenBlocks(NamedTuple):
    """Queries or keys of a block, how many blocks have them, and all blocks over these."""

    size: int
    count: int
    heads: int


def counted(shape: Shape, visited: tuple[int, ...]) -> Callable[[KernelDump], KernelTiles | None]:
    """Return a function that counts the tiles of a kernel's forward.

    `visited` are the tiles of one head without and with a test of the mask; () counts them from the
    shape's mask. The result is None if the kernel's blocks do not show its tiles, or if its grid
    has another number of steps: then every step is priced in full. A grid that only the device
    knows must have a mask or given tiles.
    """
    return lambda dump: _tiles(dump, shape, visited)


def _tiles(dump: KernelDump, shape: Shape, visited: tuple[int, ...]) -> KernelTiles | None:
    (q, k), steps = _lengths(dump, shape), dump.step.loop.steps
    if shape.mask.is_full and steps is None and not visited:
        return None  # such a kernel skips tiles; the default mask does not show which
    if q is None or k is None:
        if visited:
            return _given(dump, (), 0, shape.batch * shape.heads, visited)
        if shape.mask.is_full or steps is not None:
            return None
        rule = f"its blocks do not show which axis has the tokens of {shape.name}"
        raise Unsupported("estimate", dump.name, rule, "count the visited tiles: --visited 28,8")
    block = q.size, k.size
    if visited:
        return _given(dump, block, q.count * k.count, q.heads, visited)
    kinds = shape.call().mask.block_map(*block, shape.q_len, shape.kv_len)
    if shape.kv_len % k.size:  # the kernel hides the padding of the last keys
        kinds = np.where((kinds == FULL) & (np.arange(k.count) == k.count - 1), MIXED, kinds)
    full, some = int(np.sum(kinds == FULL)), int(np.sum(kinds != 0))
    widest, tallest = (int((kinds != 0).sum(axis=axis).max()) for axis in (1, 0))
    grids = q.count * k.count, q.count * widest, tallest * k.count
    a_tile = shape.operations / max(1, some * q.heads)
    found = KernelTiles(block, full, some - full, grids, q.heads, a_tile, False)
    is_like = steps is None or steps * dump.cores in {q.heads * n for n in grids}
    return found if is_like else None


def _given(
    dump: KernelDump, block: tuple[int, ...], every: int, heads: int, visited: tuple[int, ...]
) -> KernelTiles:
    full, masked = visited
    steps, most = dump.step.loop.steps, every
    if steps is not None:
        most = steps * dump.cores // heads
    if most and full + masked > most:
        rule = f"a head of {dump.name} has {most} tiles, and {full + masked} are visited"
        remedy = "give the tiles of one head, without and with a test of the mask"
        raise Unsupported("--visited", f"{full},{masked}", rule, remedy)
    return KernelTiles(block, full, masked, (most or full + masked,), heads, 0.0, False)


def _lengths(dump: KernelDump, shape: Shape) -> tuple[_TokenBlocks | None, _TokenBlocks | None]:
    inputs = [w for w in dump.windows if not w.is_output]
    if len(inputs) < 2:
        return None, None
    return _of(inputs[0], shape.q_len), _of(inputs[1], shape.kv_len)


def _of(window: Window, length: int) -> _TokenBlocks | None:
    """Find the axis of the tokens: its length fits; of several axes the second."""
    sides = tuple(zip(window.whole, window.block, strict=True))
    fits = [i for i, (n, part) in enumerate(sides) if n in (length, -(-length // part) * part)]
    if not fits or (len(fits) > 1 and 1 not in fits):
        return None
    whole, size = sides[fits[0] if len(fits) == 1 else 1]
    count = -(-whole // size)
    return _TokenBlocks(size, count, window.blocks // count)
