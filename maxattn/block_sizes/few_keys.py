"""Tiles of `tpu_few_keys`: one tile has all keys, so a tile is a number of queries and of heads."""

from __future__ import annotations

from typing import NamedTuple

from maxattn.block_sizes.sizes import FLOAT, ITEMSIZE, LANES, chip_of, round_up
from maxattn.call import Call
from maxattn.target import Target

FEW_KEYS = "tpu_few_keys"  # the kernel's name
MOST_KEYS = 1024
HEADS = 2  # a second head fills the waits of the first; more heads gain little
LONGEST = 4096  # queries
PAIRS = 2**21
"""Most (query, key, head) triples of a step in bfloat16. By libtpu's schedules, larger steps are no
faster: the kernel does not loop, so its program has up to 16,000 bundles."""
ROOM = 32 * 2**20  # bytes of VMEM for which `PAIRS` holds: half of it, half of the pairs


class FewKeysTile(NamedTuple):
    """A step of the grid: numbers of queries, and of query heads."""

    queries: int
    heads: int

    def __str__(self) -> str:
        heads = "head" if self.heads == 1 else "heads"
        return f"q {self.queries} of {self.heads} {heads}, all keys"


def tile_of(call: Call, target: Target, backward: bool = False) -> FewKeysTile | None:
    """Return the tile of a forward or backward; None if a step with 128 queries is too large."""
    keys, chip = round_up(call.kv_len, LANES), chip_of(target)
    limit = PAIRS * (1.0 if chip is None else min(1.0, chip.limit / ROOM))
    limit /= 4 if ITEMSIZE[call.dtype] == FLOAT else 1  # six products for one
    limit /= 2 if backward else 1  # five products in the place of two
    every = _legal_heads(call, int(limit / (keys * LANES)))
    if not every:
        return None
    fewest = next((n for n in every if n >= HEADS), every[-1])
    longest = min(LONGEST, int(limit / (keys * fewest)) // LANES * LANES)
    queries = round_up(-(-call.q_len // -(-call.q_len // longest)), LANES)
    most = limit / (keys * queries)
    return FewKeysTile(queries, max(n for n in every if n <= max(most, fewest)))


def _legal_heads(call: Call, most: int) -> list[int]:
    """List the numbers of heads of a step: whole groups of a key head, and whole registers."""
    group = call.heads // call.kv_heads

    def is_whole(heads: int) -> bool:
        sides = (heads, call.heads), (heads // group, call.kv_heads)
        return all(n == every or n * call.head_dim % LANES == 0 for n, every in sides)

    fitting = (n for n in range(group, min(call.heads, most) + 1, group) if call.heads % n == 0)
    return [n for n in fitting if is_whole(n)]
