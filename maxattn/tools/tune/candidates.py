"""Candidates for a call: kernels or sizes to time, and tiles to compile for a TPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import product
from math import log2
from typing import Any, NamedTuple

from maxattn.block_sizes import BlockSizes, adjust
from maxattn.block_sizes.estimated.choose import padded_pairs
from maxattn.block_sizes.estimated.step_cost import Kind, Tile
from maxattn.block_sizes.sizes import LANES, Facts, round_up
from maxattn.block_sizes.transposed import PASSES
from maxattn.block_sizes.vmem import Part, fits
from maxattn.call import Call
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.config.measurements import BLOCKS
from maxattn.kernels import KERNELS, build, refusal, scores_of
from maxattn.kernels.auto.tuned_order import PLAIN
from maxattn.kernels.base import Kernel
from maxattn.kernels.blockwise.chunk_sizes import choose_chunks
from maxattn.kernels.flash import has_fa4
from maxattn.masks import EMPTY
from maxattn.target import Target
from maxattn.tools.memory import fits_alone
from maxattn.tuned import Sizes

# Overhead of a grid step, in query-key pairs: an assumption, not measured.
STEP = 256 * 256


# ---- kernels -------------------------------------------------------------------------------------

MOST_OPERATIONS = 2e12  # most FLOPs of plain JAX if another kernel can run; more take minutes
SHARE = 0.25  # most of the device's memory for one of several copies of the scores


class KernelCandidates(NamedTuple):
    """The kernels to time, built for a call, and why each other kernel is not timed."""

    built: dict[str, Kernel]
    left_out: dict[str, str]


def kernel_candidates(call: Call, config: AttentionConfig, target: Target) -> KernelCandidates:
    """Return the kernels to time for a call, also those that `deterministic` excludes."""
    reasons = {name: refusal(name, call, target) for name in KERNELS}
    runs = [name for name, reason in reasons.items() if reason is None]
    # Kernels for other devices are not mentioned.
    left_out = {n: r.rule for n, r in reasons.items() if r and r.feature != "platform"}
    built = {name: build(name, call, config, target) for name in runs}
    for name in runs:
        others = [each for each in built if each != name]
        if why := _why_untimed(name, built[name], call, target, others):
            left_out[name] = why
            del built[name]
    return KernelCandidates(built, left_out)


def _why_untimed(name: str, kernel: Kernel, call: Call, target: Target, others: list[str]) -> str:
    """Return why a kernel that can run is not timed; "" if it is timed."""
    if name == "flash" and target.platform == "gpu" and not has_fa4(target):
        return "it runs cuDNN here, which is timed as cudnn"
    if target.platform == "cpu" and kernel.is_pallas:
        return "a CPU only interprets it, step by step"
    scores = 4.0 * scores_of(call)
    # The machine's memory if the device has none.
    own = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    most = SHARE * (target.device.memory or own)
    if name == "dot_product" and scores > most:
        return f"its scores take {scores / 2**30:.1f} GiB, more than {most / 2**30:.1f} GiB"
    work = scores * call.head_dim
    if name in PLAIN and work > MOST_OPERATIONS and set(others) - set(PLAIN):
        return "plain JAX takes too long for so many query-key pairs"
    return ""


# ---- sizes of one kernel -------------------------------------------------------------------------

BLOCK_CHOICES = (128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
COMPUTE_CHOICES = (256, 512, 1024, 2048)
CHUNK_CHOICES = (128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def candidates(
    kernel: str, call: Call, target: Target, training: bool, limit: int
) -> tuple[Sizes, ...]:
    """Return at most `limit` sizes: the default, then tiles by cost, chunks by distance from it."""
    if kernel in BLOCKS:
        first, *others = _of_blocks(kernel, call, target, training)
        others.sort(key=lambda sizes: cost_of(sizes, call))
    else:
        first, *others = _of_chunks(call)

        def doublings(other: Sizes) -> float:
            return sum(abs(log2(x / y)) for (_, x), (_, y) in zip(first, other, strict=True))

        others.sort(key=doublings)
    return (first, *others[: limit - 1])


def sizes_text(sizes: Sizes) -> str:
    """Write sizes in one line."""
    values: dict[str, Any] = dict(sizes)
    if "block_q" in values:
        return str(BlockSizes(**values))
    return ", ".join(f"{key} {value}" for key, value in sizes)


def cost_of(sizes: Sizes, call: Call) -> tuple[int, int]:
    """Return a forward's cost to sort by: pairs plus the steps' overhead, then compute blocks."""
    values = dict(sizes)
    tile = values["block_q"], values["block_kv"]
    steps = _steps(tile, call)
    if not call.mask.is_full and not call.mask.has_data:
        kinds = call.mask.block_map(*tile, call.q_len, call.kv_len)
        steps = int((kinds != EMPTY).sum())
    parts = tile[1] // values["block_kv_compute"]
    return steps * (tile[0] * tile[1] + STEP), steps * parts


def _of_blocks(kernel: str, call: Call, target: Target, training: bool) -> list[Sizes]:
    """List the default block sizes, then legal ones with which the kernel fits the device."""
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
    return [tuple(sizes.given().items()) for sizes in found]


def _of_chunks(call: Call) -> list[Sizes]:
    choices = (
        (min(q, call.q_len), min(kv, call.kv_len))
        for q, kv in product(CHUNK_CHOICES, CHUNK_CHOICES)
        if q * kv < 2**24
    )
    found = dict.fromkeys((choose_chunks(call, None, None), *choices))
    return [(("query_chunk_size", q), ("key_chunk_size", kv)) for q, kv in found]


def _steps(tile: Tile, call: Call) -> int:
    return padded_pairs(tile, call) // (tile[0] * tile[1])


# ---- tiles of a TPU, to compile ------------------------------------------------------------------

LONGEST, SHORTEST = 4096, 256  # tokens of a block
LARGEST = 2**22  # most query-key pairs of a tile: with more, a step's overhead is negligible
COMMON = 512, 1024, 2048  # block lengths with which every kernel does well, as measured
COMPUTE_STEP = 128 * 128  # overhead of each compute block of a tile, in query-key pairs
ALIKE = 1.25  # tiles whose sides differ by a smaller factor have similar schedules
PARTS: dict[Kind, Part] = {"fwd": "forward", "dkv": "dkv", "fused": "fused", "dq": "dq"}


def tile_choices(kind: Kind, call: Call, facts: Facts) -> list[Tile]:
    """List tiles that fit VMEM, sorted by their padded pairs plus the overhead of their steps."""

    def does_fit(tile: Tile) -> bool:
        whole = tile[0], tile[1], tile[-1]
        if facts.kernel == "tpu_flash":
            return PASSES[kind].fits(whole, facts)
        return fits(PARTS[kind], whole, facts)

    def pairs(tile: Tile) -> int:
        parts = tile[1] // tile[-1]
        return padded_pairs(tile, call) + _steps(tile, call) * (STEP + COMPUTE_STEP * parts)

    queries, keys = (_lengths(n) for n in (call.q_len, call.kv_len))
    sides = ((q, kv) for q, kv in product(queries, keys) if q * kv <= LARGEST)
    found = [tile for side in sides for tile in _tiles(kind, *side) if does_fit(tile)]
    return sorted(found, key=lambda tile: (pairs(tile), tile))


def without_likes(choices: Sequence[Tile], call: Call) -> Iterator[Tile]:
    """Yield the tiles, without any that is similar to an earlier tile and pads about as much."""
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
    """Return block lengths to try: `COMMON`, and those that cut `length` into equal parts."""
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
