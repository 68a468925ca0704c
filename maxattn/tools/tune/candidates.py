"""Which sizes are worth timing, ranked by facts: padding, and the steps of the grid."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import log2
from typing import Any

from maxattn.block_sizes import BlockSizes, adjust
from maxattn.block_sizes.sizes import round_up
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.config.measurements import BLOCKS
from maxattn.kernels.blockwise.chunk_sizes import choose_chunks
from maxattn.masks import EMPTY
from maxattn.target import Target
from maxattn.tools.memory import fits_alone
from maxattn.tuned import Sizes

BLOCK_CHOICES = (128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
COMPUTE_CHOICES = (256, 512, 1024, 2048)
CHUNK_CHOICES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)
# Pairs that a step of the grid is taken to cost beside its own work: an assumption, not measured.
STEP = 256 * 256


@dataclass(frozen=True)
class Candidate:
    """Hold sizes and the facts about them.

    Args:
        sizes: (key of the config, value).
        pairs: queries times keys that are computed, padding and partly masked tiles among them.
        steps: of the forward's grid.
        compute_steps: of the forward, each tile's keys computed in parts.
        share: computed pairs over T x S: above 1 is padding, below 1 a mask that skips tiles.
    """

    sizes: Sizes
    pairs: int
    steps: int
    compute_steps: int
    share: float

    @property
    def cost(self) -> tuple[int, int]:
        """The estimate that ranks candidates: pairs, with those that steps cost; then steps."""
        return self.pairs + STEP * self.steps, self.compute_steps

    def __str__(self) -> str:
        values: dict[str, Any] = dict(self.sizes)
        if "block_q" in values:
            return str(BlockSizes(**values))
        return ", ".join(f"{key} {value}" for key, value in self.sizes)


def candidates(
    kernel: str, call: Call, target: Target, training: bool, limit: int
) -> tuple[Candidate, ...]:
    """Return the sizes to time: what runs by default first, then the others.

    Tiles of a TPU's kernel come by their estimated cost; chunks, which any machine computes and
    whose steps cost next to nothing, by their distance from the default.

    Args:
        kernel: its name.
        call: what one device computes.
        target: its VMEM limits the tiles.
        training: whether the backward must run too.
        limit: how many at most, the default among them.
    """
    if kernel in BLOCKS:
        first, *others = _of_blocks(kernel, call, target, training)
        others.sort(key=lambda c: c.cost)
    else:
        first, *others = _of_chunks(call)

        def doublings(other: Candidate) -> float:
            pairs = zip(first.sizes, other.sizes, strict=True)
            return sum(abs(log2(x / y)) for (_, x), (_, y) in pairs)

        others.sort(key=doublings)
    return (first, *others[: limit - 1])


def _of_blocks(kernel: str, call: Call, target: Target, training: bool) -> list[Candidate]:
    """Make the block sizes that the rules leave as they are, and whose dQ fits the device."""
    default, _ = adjust(FlashBlockSizes(), call, kernel, target, training)  # type: ignore[arg-type]
    found = {default: None}
    fused = (True, False) if training and kernel == "flash" else (None,)
    for q, kv, compute, one in product(BLOCK_CHOICES, BLOCK_CHOICES, COMPUTE_CHOICES, fused):
        if kv % compute == 0:
            asked = FlashBlockSizes(
                block_q=q, block_kv=kv, block_kv_compute=compute, use_fused_bwd_kernel=one
            )
            sizes, changes = adjust(asked, call, kernel, target, training)  # type: ignore[arg-type]
            if not changes and fits_alone(kernel, call, sizes, training, target.device_kind):
                found.setdefault(sizes)
    return [_candidate(tuple(b.given().items()), (b.block_q, b.block_kv), call) for b in found]


def _of_chunks(call: Call) -> list[Candidate]:
    default = choose_chunks(call, None, None)
    choices = (
        (min(q, call.q_len), min(kv, call.kv_len))
        for q, kv in product(CHUNK_CHOICES, CHUNK_CHOICES)
        if q * kv < 2**24
    )
    keys = ("query_chunk_size", "key_chunk_size")
    return [
        _candidate(tuple(zip(keys, tile, strict=True)), tile, call)
        for tile in dict.fromkeys((default, *choices))
    ]


def _candidate(sizes: Sizes, tile: tuple[int, int], call: Call) -> Candidate:
    q, kv = (round_up(n, b) for n, b in zip((call.q_len, call.kv_len), tile, strict=True))
    steps = (q // tile[0]) * (kv // tile[1])
    if not call.mask.is_full and not call.mask.has_data:
        kinds = call.mask.block_map(*tile, call.q_len, call.kv_len)
        steps = int((kinds != EMPTY).sum())
    pairs = steps * tile[0] * tile[1]
    parts = tile[1] // int(dict(sizes).get("block_kv_compute", tile[1]))
    return Candidate(sizes, pairs, steps, steps * parts, pairs / (call.q_len * call.kv_len))
