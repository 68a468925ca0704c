"""Tiles of `tpu_flash`, from what was asked for and from the lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from maxattn.block_sizes.adjust import facts_of
from maxattn.block_sizes.chips import Family
from maxattn.block_sizes.estimated.step_cost import Kind
from maxattn.block_sizes.sizes import (
    DKV,
    DQ,
    FORWARD,
    LANES,
    BlockSizes,
    Change,
    Facts,
    round_near,
    round_up,
)
from maxattn.block_sizes.transposed_vmem import backward_bytes, forward_bytes
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target

Tile = tuple[int, int, int]  # queries, keys, and keys computed at once
FLOAT = 4  # bytes


class Pass(NamedTuple):
    """Hold what the tiles of one kernel follow.

    Args:
        keys: of the config.
        usual: where nothing was asked, by family: the fastest by the compiler's schedule among
            those that fit.
        usual_float32: the same in float32, whose whole products are six of bfloat16 each.
        pairs: of a tile at most, by bytes of an element: the code goes through a tile without a
            loop, and larger ones take minutes to compile.
        vmem: bounds the bytes of VMEM that a tile takes.
    """

    keys: tuple[str, ...]
    usual: Mapping[Family, Tile]
    usual_float32: Tile
    pairs: Mapping[int, int]
    vmem: Callable[[Tile, Facts], float]

    def fits(self, tile: Tile, facts: Facts) -> bool:
        """Tell whether a tile has no more pairs than it may, and fits VMEM."""
        in_vmem = facts.chip is None or self.vmem(tile, facts) <= facts.chip.limit
        return in_vmem and tile[0] * tile[1] <= self.pairs[facts.itemsize]


FORWARD_PASS = Pass(
    FORWARD,
    {
        "v4": (1024, 1024, 512),
        "v5p": (1024, 1024, 512),
        "v6e": (2048, 2048, 512),
        "v7x": (2048, 2048, 1024),
    },
    (512, 512, 256),
    {2: 2**22, 4: 2**20},
    forward_bytes,
)
BACKWARD_PASS = Pass(
    DKV,
    {
        "v4": (1024, 1024, 256),
        "v5p": (1024, 1024, 256),
        "v6e": (2048, 1024, 256),
        "v7x": (2048, 1024, 256),
    },
    (512, 512, 256),
    {2: 2**22, 4: 2**19},
    backward_bytes,
)
PASSES: dict[Kind, Pass] = {"fwd": FORWARD_PASS, "fused": BACKWARD_PASS}


def sizes_of(
    asked: FlashBlockSizes, call: Call, target: Target
) -> tuple[BlockSizes, tuple[Change, ...]]:
    """Return tiles of both kernels that compile, and how they differ from what was asked for.

    Args:
        asked: the config's sizes.
        call: the local call.
        target: the machine, whose VMEM limits the tiles.
    """
    forward, changes = forward_tile(asked, call, target)
    backward, more = backward_tile(asked, call, target)
    sizes = BlockSizes(*forward, *backward, use_fused_bwd_kernel=True)
    return sizes, (*changes, *more, *_unused(asked))


def forward_tile(
    asked: FlashBlockSizes, call: Call, target: Target
) -> tuple[Tile, tuple[Change, ...]]:
    """Return the forward's tile, and how it differs from what was asked for."""
    wanted = tuple(getattr(asked, key) for key in FORWARD)
    return _tile(FORWARD_PASS, wanted, asked, facts_of(call, "tpu_flash", target, training=True))


def backward_tile(
    asked: FlashBlockSizes, call: Call, target: Target
) -> tuple[Tile, tuple[Change, ...]]:
    """Return the backward's tile, whose blocks are the forward's where those alone were asked."""
    q, kv = asked.block_q_dkv or asked.block_q, asked.block_kv_dkv or asked.block_kv
    wanted = q, kv, asked.block_kv_dkv_compute
    return _tile(BACKWARD_PASS, wanted, asked, facts_of(call, "tpu_flash", target, training=True))


def _tile(
    kind: Pass, wanted: tuple[int | None, ...], asked: FlashBlockSizes, facts: Facts
) -> tuple[Tile, tuple[Change, ...]]:
    """Return a tile that fits.

    Lengths that are left open are divided evenly, so that little is padding. Keys computed at once
    need not divide a block: its last ones may be fewer.
    """
    usual = kind.usual_float32
    if facts.itemsize < FLOAT:
        usual = kind.usual[facts.chip.family if facts.chip else "v6e"]
    q = _rounded(wanted[0], facts.q_most) or _even(facts.q_most, usual[0])
    kv = _rounded(wanted[1], facts.kv_most) or _even(facts.kv_most, usual[1])
    tile = q, kv, min(_rounded(wanted[2], kv) or usual[2], kv)
    while (smaller := _smaller(kind, tile, facts)) is not None:
        tile = smaller
    return tile, tuple(_changes(kind, asked, tile, facts))


def _rounded(asked: int | None, most: int) -> int | None:
    return None if asked is None else round_near(min(asked, most), LANES)


def _even(length: int, usual: int) -> int:
    """Divide a padded length into equal blocks of at most the usual size."""
    return round_up(-(-length // -(-length // usual)), LANES)


def _smaller(kind: Pass, tile: Tile, facts: Facts) -> Tile | None:
    """Return the next smaller tile where this one does not fit; None where it does."""
    q, kv, compute = tile
    is_long = q * kv > kind.pairs[facts.itemsize]
    if kind.fits(tile, facts) or max(q, kv) == LANES:
        return None
    if compute > 2 * LANES and not is_long:
        return q, kv, round_near(compute // 2, LANES)
    if q >= kv:
        return round_up(q // 2, LANES), kv, compute
    kv = round_up(kv // 2, LANES)
    return q, kv, min(compute, kv)


def _changes(kind: Pass, asked: FlashBlockSizes, tile: Tile, facts: Facts) -> Iterator[Change]:
    for key, used in zip(kind.keys, tile, strict=True):
        wanted = getattr(asked, key)
        if wanted is not None and wanted != used:
            yield Change(key, wanted, used, _reason(kind, key, wanted, used, facts))


def _reason(kind: Pass, key: str, asked: int, used: int, facts: Facts) -> str:
    if round_near(asked, LANES) == used:
        return f"must be a multiple of {LANES}"
    of_queries = key.startswith("block_q")
    if used == (facts.q_most if of_queries else facts.kv_most):
        return f"{'query' if of_queries else 'key'} length"
    pairs = f"at most {kind.pairs[facts.itemsize]} pairs a tile"
    vmem = f"{facts.chip.limit // 2**20} MiB of VMEM on {facts.chip.name}" if facts.chip else ""
    return f"{pairs}, and {vmem}" if vmem else pairs


def _unused(asked: FlashBlockSizes) -> Iterator[Change]:
    """Say which sizes of other kernels' backward are not read."""
    if asked.use_fused_bwd_kernel is False:
        reason = "tpu_flash has the fused backward alone"
        yield Change("use_fused_bwd_kernel", False, True, reason)
    for key in DQ:
        if (wanted := getattr(asked, key)) is not None:
            yield Change(key, wanted, None, "the fused backward computes dQ too")
