"""Tiles of `tpu_flash`: the requested sizes, or usual sizes, shrunk until they fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from maxattn.block_sizes.estimated.step_cost import Kind
from maxattn.block_sizes.sizes import (
    DKV,
    DQ,
    FLOAT,
    FORWARD,
    LANES,
    SUBLANES,
    BlockSizes,
    Change,
    Facts,
    Family,
    facts_of,
    round_near,
    round_up,
)
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target

Tile = tuple[int, int, int]  # queries, keys, and keys computed at once
SCORES = {2: 14, 4: 48}
"""Bytes of VMEM per (query, key) pair of a backward tile, by bytes of an element: a bound fitted to
the compiler's reports, for scores, weights, their gradients, the mask and float32 products."""
ROWS = 2 * SUBLANES * FLOAT  # bytes of one token's statistic in two buffers


def forward_bytes(tile: Tile, facts: Facts) -> float:
    """Bound the bytes of VMEM that the forward takes.

    Operands and results have two buffers each: one is fetched or written while the other is used.
    Accumulators have one buffer. Scores and weights of one compute step spill from registers.
    """
    q, kv, compute = tile
    head = round_up(facts.head_dim, LANES)
    windows = 4 * (q + kv) * head * facts.itemsize + q * head * FLOAT
    # per query: segment id, mask code, LSE, softmax sum and maximum; per key: segment id
    rows = (4 * ROWS + 2 * SUBLANES * FLOAT) * q + ROWS * kv
    return windows + rows + (FLOAT + facts.itemsize) * q * compute


def backward_bytes(tile: Tile, facts: Facts) -> float:
    """Bound the bytes of VMEM that the backward takes."""
    q, kv, compute = tile
    head, item = round_up(facts.head_dim, LANES), facts.itemsize
    # q and dout in two buffers; dQ before and after the addition, and the added term
    queries = 4 * q * head * item + 3 * q * head * FLOAT + 4 * ROWS * q
    # k and v in two buffers, k transposed; dK and dV: accumulators, and results in two buffers
    keys = 5 * kv * head * item + 6 * kv * head * FLOAT + ROWS * kv
    return queries + keys + SCORES[item] * q * compute


class Pass(NamedTuple):
    """The limits and the usual tiles of one kernel."""

    keys: tuple[str, ...]  # the config's keys of the three sizes
    # the fastest tiles that fit, by family, estimated from the compiler's schedules
    usual: Mapping[Family, Tile]
    # the fastest tile in float32, whose products are six bfloat16 products each
    usual_float32: Tile
    # most (query, key) pairs in a tile, by bytes of an element: the kernel does not loop over a
    # tile, so larger tiles take minutes to compile
    pairs: Mapping[int, int]
    # the function that bounds the bytes of VMEM that a tile takes
    vmem: Callable[[Tile, Facts], float]

    def fits(self, tile: Tile, facts: Facts) -> bool:
        """Check whether a tile has few enough pairs and fits VMEM."""
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
    """Return tiles with which both kernels compile, and the changes from the requested sizes."""
    forward, changes = forward_tile(asked, call, target)
    backward, more = backward_tile(asked, call, target)
    unused = []
    if asked.use_fused_bwd_kernel is False:
        reason = "tpu_flash's only backward is fused"
        unused.append(Change("use_fused_bwd_kernel", False, True, reason))
    for key in DQ:
        if (wanted := getattr(asked, key)) is not None:
            unused.append(Change(key, wanted, None, "the fused backward computes dQ too"))
    sizes = BlockSizes(*forward, *backward, use_fused_bwd_kernel=True)
    return sizes, (*changes, *more, *unused)


def forward_tile(
    asked: FlashBlockSizes, call: Call, target: Target
) -> tuple[Tile, tuple[Change, ...]]:
    """Return the forward's tile, and its changes from the requested sizes."""
    wanted = tuple(getattr(asked, key) for key in FORWARD)
    return _tile(FORWARD_PASS, wanted, asked, facts_of(call, "tpu_flash", target, training=True))


def backward_tile(
    asked: FlashBlockSizes, call: Call, target: Target
) -> tuple[Tile, tuple[Change, ...]]:
    """Return the backward's tile and its changes; unset blocks equal the user's forward blocks."""
    q, kv = asked.block_q_dkv or asked.block_q, asked.block_kv_dkv or asked.block_kv
    wanted = q, kv, asked.block_kv_dkv_compute
    return _tile(BACKWARD_PASS, wanted, asked, facts_of(call, "tpu_flash", target, training=True))


def _tile(
    kind: Pass, wanted: tuple[int | None, ...], asked: FlashBlockSizes, facts: Facts
) -> tuple[Tile, tuple[Change, ...]]:
    """Return a tile that fits, and its changes from the requested sizes.

    If the user sets no block size, the length is divided evenly, which adds little padding. The
    number of keys computed at once need not divide the KV block: the last step may have fewer.
    """

    def rounded(size: int | None, most: int) -> int | None:
        return None if size is None else round_near(min(size, most), LANES)

    def even(length: int, usual: int) -> int:
        return round_up(-(-length // -(-length // usual)), LANES)

    usual = kind.usual_float32
    if facts.itemsize < FLOAT:
        usual = kind.usual[facts.chip.family if facts.chip else "v6e"]
    q = rounded(wanted[0], facts.q_most) or even(facts.q_most, usual[0])
    kv = rounded(wanted[1], facts.kv_most) or even(facts.kv_most, usual[1])
    compute = min(rounded(wanted[2], kv) or usual[2], kv)
    while not kind.fits((q, kv, compute), facts) and max(q, kv) > LANES:
        if compute > 2 * LANES and q * kv <= kind.pairs[facts.itemsize]:
            compute = round_near(compute // 2, LANES)
        elif q >= kv:
            q = round_up(q // 2, LANES)
        else:
            kv = round_up(kv // 2, LANES)
            compute = min(compute, kv)
    tile = q, kv, compute
    changes = tuple(
        Change(key, asked_for, used, _reason(kind, key, asked_for, used, facts))
        for key, used in zip(kind.keys, tile, strict=True)
        if (asked_for := getattr(asked, key)) not in (None, used)
    )
    return tile, changes


def _reason(kind: Pass, key: str, asked: int, used: int, facts: Facts) -> str:
    if round_near(asked, LANES) == used:
        return f"must be a multiple of {LANES}"
    of_queries = key.startswith("block_q")
    if used == (facts.q_most if of_queries else facts.kv_most):
        return f"{'query' if of_queries else 'key'} length"
    pairs = f"at most {kind.pairs[facts.itemsize]} pairs in a tile"
    vmem = f"{facts.chip.limit // 2**20} MiB of VMEM on {facts.chip.name}" if facts.chip else ""
    return f"{pairs}, and {vmem}" if vmem else pairs
