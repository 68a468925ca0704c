"""Tiles of the forward of `tpu_flash`, from what was asked for and from the lengths."""

from __future__ import annotations

from collections.abc import Iterator

from maxattn.block_sizes.adjust import facts_of
from maxattn.block_sizes.chips import Family
from maxattn.block_sizes.sizes import FORWARD, LANES, Change, Facts, round_near, round_up
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target

Tile = tuple[int, int, int]  # queries, keys, and keys computed at once

# Where nothing was asked: the fastest by the compiler's schedule among those that fit.
USUAL: dict[Family, Tile] = {
    "v4": (1024, 1024, 512),
    "v5p": (1024, 1024, 512),
    "v6e": (2048, 2048, 512),
    "v7x": (2048, 2048, 1024),
}
# Whole products of float32 are six of bfloat16 each, and larger tiles take minutes to compile.
USUAL_FLOAT32 = 512, 512, 256
# Pairs of a tile, by bytes of an element: the code goes through a tile without a loop.
MOST_PAIRS = {2: 2**22, 4: 2**20}
FLOAT = 4  # bytes


def forward_tile(
    asked: FlashBlockSizes, call: Call, target: Target
) -> tuple[Tile, tuple[Change, ...]]:
    """Return a tile that compiles, and how it differs from what was asked for.

    Lengths that are left open are divided evenly, so that little is padding. Keys computed at once
    need not divide a block: its last ones may be fewer.

    Args:
        asked: the config's sizes.
        call: the local call.
        target: the machine, whose VMEM limits the tile.
    """
    facts = facts_of(call, "flash", target, training=True)
    usual = USUAL_FLOAT32
    if facts.itemsize < FLOAT:
        usual = USUAL[facts.chip.family if facts.chip else "v6e"]
    wanted = tuple(getattr(asked, key) for key in FORWARD)
    q = _rounded(wanted[0], facts.q_most) or _even(facts.q_most, usual[0])
    kv = _rounded(wanted[1], facts.kv_most) or _even(facts.kv_most, usual[1])
    tile = q, kv, min(_rounded(wanted[2], kv) or usual[2], kv)
    while (smaller := _smaller(tile, facts)) is not None:
        tile = smaller
    return tile, tuple(_changes(wanted, tile, facts))


def _rounded(asked: int | None, most: int) -> int | None:
    return None if asked is None else round_near(min(asked, most), LANES)


def _even(length: int, usual: int) -> int:
    """Divide a padded length into equal blocks of at most the usual size."""
    return round_up(-(-length // -(-length // usual)), LANES)


def vmem_bytes(tile: Tile, facts: Facts) -> int:
    """Bound the bytes of VMEM that the forward takes.

    Operands and results are there twice, the sums once; scores and weights of the keys computed at
    once spill.
    """
    q, kv, compute = tile
    head = round_up(facts.head_dim, LANES)
    windows = 4 * (q + kv) * head * facts.itemsize + q * head * FLOAT
    rows = (2 * 8 * 4 + 8 + 8) * q * FLOAT + 2 * 8 * kv * FLOAT
    return windows + rows + (FLOAT + facts.itemsize) * q * compute


def _smaller(tile: Tile, facts: Facts) -> Tile | None:
    """Return the next smaller tile where this one does not fit; None where it does."""
    q, kv, compute = tile
    is_long = q * kv > MOST_PAIRS[facts.itemsize]
    fits = facts.chip is None or vmem_bytes(tile, facts) <= facts.chip.limit
    if (fits and not is_long) or max(q, kv) == LANES:
        return None
    if compute > 2 * LANES and not is_long:
        return q, kv, round_near(compute // 2, LANES)
    if q >= kv:
        return round_up(q // 2, LANES), kv, compute
    kv = round_up(kv // 2, LANES)
    return q, kv, min(compute, kv)


def _changes(wanted: tuple[int | None, ...], tile: Tile, facts: Facts) -> Iterator[Change]:
    for key, asked, used in zip(FORWARD, wanted, tile, strict=True):
        if asked is not None and asked != used:
            yield Change(key, asked, used, _reason(key, asked, used, facts))


def _reason(key: str, asked: int, used: int, facts: Facts) -> str:
    if round_near(asked, LANES) == used:
        return f"must be a multiple of {LANES}"
    most = facts.q_most if key == "block_q" else facts.kv_most
    if used == most:
        return f"{'query' if key == 'block_q' else 'key'} length"
    pairs = f"at most {MOST_PAIRS[facts.itemsize]} pairs a tile"
    vmem = f"{facts.chip.limit // 2**20} MiB of VMEM on {facts.chip.name}" if facts.chip else ""
    return f"{pairs}, and {vmem}" if vmem else pairs
