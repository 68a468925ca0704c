"""Which tiles of a kernel are worth compiling, by cheap rules and in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from maxattn.block_sizes.estimated.choose import padded_pairs
from maxattn.block_sizes.estimated.step_cost import Kind, Tile
from maxattn.block_sizes.sizes import LANES, Facts, round_up
from maxattn.block_sizes.transposed import PASSES
from maxattn.block_sizes.vmem import Part, fits
from maxattn.call import Call

LONGEST, SHORTEST = 4096, 256  # tokens of a block
LARGEST = 2**22  # pairs of a tile: in a larger one a step's own cost is next to nothing already
COMMON = 512, 1024, 2048  # that every kernel was seen to do well with
# Pairs that a step is taken to cost beside its own work, and a part of its keys: assumptions.
STEP, COMPUTE_STEP = 256 * 256, 128 * 128
ALIKE = 1.25  # tiles whose sizes differ by less have about the same schedule
PARTS: dict[Kind, Part] = {"fwd": "forward", "dkv": "dkv", "fused": "fused", "dq": "dq"}


def tile_choices(kind: Kind, call: Call, facts: Facts) -> list[Tile]:
    """List tiles that fit VMEM, those first that should be fastest.

    Fewest pairs first, padding and what steps cost among them.

    Args:
        kind: of the kernel.
        call: what one device computes.
        facts: of the call and the TPU.
    """
    queries, keys = (_lengths(n) for n in (call.q_len, call.kv_len))
    sides = ((q, kv) for q, kv in product(queries, keys) if q * kv <= LARGEST)
    every = (tile for side in sides for tile in _tiles(kind, *side))
    found = [tile for tile in every if _fits(kind, tile, facts)]
    return sorted(found, key=lambda tile: (weight(tile, call), tile))


def weight(tile: Tile, call: Call) -> int:
    """Return the pairs that a head's tiles are taken to cost."""
    q, kv = (round_up(n, b) for n, b in zip((call.q_len, call.kv_len), tile, strict=False))
    steps = (q // tile[0]) * (kv // tile[1])
    parts = tile[1] // tile[-1]
    return q * kv + steps * (STEP + COMPUTE_STEP * parts)


def without_likes(choices: Sequence[Tile], call: Call) -> Iterator[Tile]:
    """Leave out a tile that is like one before it and pads no less."""
    taken: list[Tile] = []
    for tile in choices:
        alike = (
            one
            for one in taken
            if all(max(a, b) < ALIKE * min(a, b) for a, b in zip(tile, one, strict=True))
        )
        least = 0.99 * min((padded_pairs(one, call) for one in alike), default=float("inf"))
        if padded_pairs(tile, call) < least:
            taken.append(tile)
            yield tile


def _lengths(length: int) -> list[int]:
    """Return block lengths: common ones, and those that cut a length into equal parts."""
    most = min(LONGEST, round_up(length, LANES) // 2)
    parts = range(2, length // SHORTEST + 1)
    equal = (round_up(-(-length // n), LANES) for n in parts)
    return sorted({n for n in (*COMMON, *equal) if SHORTEST <= n <= most})


def _tiles(kind: Kind, q: int, kv: int) -> Iterator[Tile]:
    if kind == "dq":
        yield q, kv
        return
    for n in range(1, 5):
        compute = kv // n
        if kv % n == 0 and compute % LANES == 0 and compute >= SHORTEST:
            yield q, kv, compute


def _fits(kind: Kind, tile: Tile, facts: Facts) -> bool:
    whole = tile[0], tile[1], tile[-1]
    if facts.kernel == "tpu_flash":
        return PASSES[kind].fits(whole, facts)
    return fits(PARTS[kind], whole, facts)
