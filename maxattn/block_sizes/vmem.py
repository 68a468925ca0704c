"""How much VMEM a Pallas kernel of splash attention takes, and the largest tiles that fit.

    bytes = windows + spill
    windows: two buffers for the tile of each operand and result (one is fetched or written while
        the other is used), one buffer for scratch
    spill:   scores and operands that do not fit the registers:
             4 bytes * (q * (a * compute + b * kv + c * H) + d * kv * H)

A tile has q queries and kv keys, `compute` of them computed at once. The windows are exact; the
constants a to d are upper bounds, fitted to the bytes that the TPU compiler reports
(`docs/measured/tpu_block_sizes.md`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import log2
from typing import Any, Literal, NamedTuple

from maxattn.block_sizes._padding import padding
from maxattn.block_sizes.sizes import (
    CHIPS,
    DKV,
    DQ,
    FLOAT,
    FORWARD,
    LANES,
    SUBLANES,
    BlockSizes,
    Facts,
    Family,
    divisors,
    round_up,
)

Part = Literal["forward", "dkv", "fused", "dq"]
ROW = FLOAT * LANES  # bytes of one token's statistics, spread over the lanes
COLUMN = FLOAT * SUBLANES  # bytes of one token's statistics, spread over the sublanes


class Spill(NamedTuple):
    """The four constants of the spill, as shares of four float32 tiles."""

    compute: float  # share of the computed scores, q x kv_compute (a)
    fetched: float  # share of the scores of the fetched keys, q x kv (b)
    query: float  # share of the Q tile, q x H (c)
    key: float  # share of the K tile, kv x H (d)


# (family, kernel, bytes of an element) -> constants, fitted as upper bounds.
SPILL: dict[tuple[Family, Part, int], Spill] = {
    ("v4", "forward", 2): Spill(0.66, 0.79, 0.43, 0.24),
    ("v4", "forward", 4): Spill(0.62, 0.98, 5.47, 1.01),
    ("v4", "dkv", 2): Spill(1.87, 0.13, 0.31, 0.0),
    ("v4", "dkv", 4): Spill(2.27, 0.0, 12.64, 0.0),
    ("v4", "fused", 2): Spill(1.11, 0.27, 0.88, 1.26),
    ("v4", "fused", 4): Spill(1.81, 0.0, 1.54, 16.16),
    ("v4", "dq", 2): Spill(0.0, 0.79, 1.69, 1.43),
    ("v4", "dq", 4): Spill(0.0, 2.06, 7.34, 3.57),
    ("v5p", "forward", 2): Spill(0.47, 0.49, 1.04, 1.2),
    ("v5p", "forward", 4): Spill(0.64, 0.77, 5.38, 1.48),
    ("v5p", "dkv", 2): Spill(0.89, 0.0, 0.73, 2.9),
    ("v5p", "dkv", 4): Spill(2.29, 0.0, 12.61, 0.0),
    ("v5p", "fused", 2): Spill(1.24, 0.0, 1.36, 1.36),
    ("v5p", "fused", 4): Spill(1.79, 0.0, 14.13, 3.6),
    ("v5p", "dq", 2): Spill(0.0, 1.52, 1.01, 0.0),
    ("v5p", "dq", 4): Spill(0.0, 2.11, 7.19, 3.56),
    ("v6e", "forward", 2): Spill(0.02, 0.71, 0.0, 0.7),
    ("v6e", "forward", 4): Spill(0.41, 0.64, 0.0, 1.92),
    ("v6e", "dkv", 2): Spill(0.94, 0.0, 0.22, 0.0),
    ("v6e", "dkv", 4): Spill(1.44, 0.0, 1.43, 7.89),
    ("v6e", "fused", 2): Spill(1.46, 0.0, 0.0, 0.0),
    ("v6e", "fused", 4): Spill(1.35, 0.0, 0.0, 13.63),
    ("v6e", "dq", 2): Spill(0.0, 1.14, 1.38, 0.0),
    ("v6e", "dq", 4): Spill(0.0, 1.27, 4.96, 4.05),
}
# In the measurements, v7x differs from v6e only in float32.
SPILL |= {
    ("v7x", part, size): spill for (family, part, size), spill in SPILL.items() if family == "v6e"
}
SPILL["v7x", "forward", 4] = Spill(0.45, 1.15, 0.0, 1.92)
SPILL["v7x", "fused", 4] = Spill(1.5, 0.0, 0.0, 15.0)
# The share of the fetched scores if one block has all keys: without a loop, v7x spills more.
ONE_BLOCK: dict[tuple[Family, Part, int], float] = {("v7x", "forward", 4): 1.6}
# How much a mask test that divides positions adds to the share of the fetched scores.
DIVIDING: dict[tuple[Family, Part, int], float] = {("v6e", "dq", 2): 0.3}
RAGGED = 1.5  # factor of the spill at head dims above 128 that are no multiple of 128, such as 160
RAGGED_FLOAT = 1.3  # the factor below 128 in float32: 1.28 was measured (v6e, head dim 40)

# Tiles (q, kv, kv_compute) that the formula refuses although they compile, for JAX's kernels in
# bfloat16 at head dim 128 (`docs/measured/tpu_block_sizes.md`). Each was compiled with operands in
# HBM, since the compiler keeps short operands in VMEM. A shorter Q block needs less.
PROVEN_HEAD_DIM = 128
PROVEN: dict[tuple[str, Part], tuple[tuple[int, int, int], ...]] = {
    ("TPU v6e", "forward"): ((3072, 2048, 1024), (2048, 4096, 1024)),
    ("TPU v6e", "dq"): ((2176, 2176, 2176),),
    ("TPU v7x", "forward"): ((3072, 2048, 1024), (2048, 4096, 1024)),
}


def windows(part: Part, facts: Facts, looped: bool) -> tuple[int, int]:
    """Count the bytes of operands, statistics and results, per query token and per key token.

    `looped`: whether the kernel computes a fetched tile in several steps.
    """
    head = round_up(facts.head_dim, LANES)
    # Bytes of an operand in two buffers, and of a float32 accumulator.
    twice, kept = 2 * head * facts.itemsize, FLOAT * head
    tokamax = facts.kernel == "tokamax_flash"
    if part == "forward":
        # q, out; ids, mask codes, LSE (tokamax: and max logits); m, l, accumulator | k, v; ids
        rows = (8 if tokamax else 6) * ROW + 2 * ROW
        return 2 * twice + rows + kept, 2 * twice + 2 * COLUMN
    if part == "dq":  # q, dout, dq; ids, codes; LSE, delta; accumulator | k, v; ids
        return 3 * twice + 4 * ROW + 4 * COLUMN + kept, 2 * twice + 2 * COLUMN
    query = 2 * twice + 8 * COLUMN  # q, dout; ids, codes, LSE, delta
    if part == "fused":  # dq; tokamax adds it to an array that it reads too
        query += (2 if tokamax else 1) * twice + (kept if looped else 0)
    return query, 4 * twice + 2 * ROW + 2 * kept  # k, v, dk, dv; ids; accumulators


def fits(part: Part, tiles: tuple[int, int, int], facts: Facts) -> bool:
    """Check whether tiles fit the chip: by the formula, or because `PROVEN` has them."""
    return facts.chip is None or tiles[0] <= longest_q(part, tiles[1], tiles[2], facts)


def longest_q(part: Part, kv: int, compute: int, facts: Facts) -> int:
    """Return the longest Q block that fits beside the KV blocks; 0 or less if none does."""
    chip = facts.chip
    assert chip is not None
    query, key = _linear(part, kv, compute, facts, chip.family)
    longest = int((chip.limit - kv * key) // query)
    of_proven = facts.kernel, facts.itemsize, facts.head_dim
    is_lowered = chip.limit < CHIPS[chip.name].limit
    is_dividing = facts.divides and (chip.family, part, facts.itemsize) in DIVIDING
    if of_proven != ("flash", 2, PROVEN_HEAD_DIM) or is_lowered or is_dividing:
        return longest
    proven = (q for q, *keys in PROVEN.get((chip.name, part), ()) if keys == [kv, compute])
    return max(longest, *proven, 0)


def _linear(part: Part, kv: int, compute: int, facts: Facts, family: Family) -> tuple[float, float]:
    """Return the bytes per query token, with the spill of the scores, and per key token."""
    key: tuple[Family, Part, int] = (family, part, facts.itemsize)
    of_query, of_key = windows(part, facts, compute < kv)
    spill = SPILL[key]
    share = 1.0
    if facts.head_dim % LANES:  # each head leaves lanes empty
        of_float = RAGGED_FLOAT if facts.itemsize == FLOAT else 1.0
        share = RAGGED if facts.head_dim > LANES else of_float
    fetched = ONE_BLOCK.get(key, spill.fetched) if facts.kv_len <= kv else spill.fetched
    fetched += DIVIDING.get(key, 0.0) if facts.divides else 0.0
    query = spill.compute * compute + fetched * kv + spill.query * facts.head_dim
    return of_query + FLOAT * share * query, of_key + FLOAT * share * spill.key * facts.head_dim


# ---- tiles that fit ------------------------------------------------------------------------------

Tiles = tuple[int, int, int]  # q, kv, kv_compute
PADDING_WEIGHT = 8.0  # 12.5% more padding costs as much as halving one size


def fit_forward(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    """Return forward sizes that fit VMEM; an empty dict if the given sizes fit."""
    now = sizes.block_q, sizes.block_kv, sizes.block_kv_compute
    best = _shrunk(now, "forward", facts, range(LANES, now[1] + 1, LANES), None)
    return _changed(sizes, FORWARD, best)


def fit_dkv(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    """Return sizes of the backward of K and V that fit; if it is fused, block_q may shrink too."""
    if (now := sizes.part(DKV)) is None:
        return {}
    fused = bool(sizes.use_fused_bwd_kernel)
    q_choices = None if fused else divisors(sizes.block_q, facts.q_step)
    kv_choices = divisors(sizes.block_kv, LANES)
    part: Part = "fused" if fused else "dkv"
    best = _shrunk((now[0], now[1], now[2]), part, facts, kv_choices, q_choices)
    changed = _changed(sizes, DKV, best)
    is_q = fused and "block_q_dkv" in changed
    return changed | ({"block_q": changed["block_q_dkv"]} if is_q else {})


def fit_dq(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    """Return sizes of the separate backward of Q that fit VMEM."""
    if (now := sizes.part(DQ)) is None:
        return {}
    q_choices, kv_choices = divisors(sizes.block_q, facts.q_step), divisors(sizes.block_kv, LANES)
    best = _shrunk((now[0], now[1], now[1]), "dq", facts, kv_choices, q_choices)
    return _changed(sizes, DQ, best[:2])


def _changed(sizes: BlockSizes, keys: tuple[str, ...], values: Iterable[int]) -> dict[str, Any]:
    return {key: new for key, new in zip(keys, values, strict=True) if new != getattr(sizes, key)}


def _shrunk(
    now: Tiles, part: Part, facts: Facts, kv_choices: Iterable[int], q_choices: list[int] | None
) -> Tiles:
    """Return the tiles that fit at the least cost, or the smallest tiles if none fit."""
    if facts.chip is None or fits(part, now, facts):
        return now

    def candidates() -> Iterator[Tiles]:
        for kv in (n for n in kv_choices if n <= now[1]):
            for compute in [kv] if part == "dq" else divisors(kv, LANES):
                most = min(now[0], longest_q(part, kv, compute, facts))
                if q_choices is None:
                    q = most // facts.q_step * facts.q_step
                else:
                    q = max((q for q in q_choices if q <= most), default=0)
                if q > 0 and (compute <= now[2] or part == "dq"):
                    yield q, kv, compute

    def cost(new: Tiles) -> tuple[float, int]:
        """Count halvings of the three sizes, and padding; at equal costs prefer the longer Q."""
        halvings = sum(log2(a / b) for a, b in zip(now, new, strict=True))
        lengths = (facts.q_len, now[0], new[0]), (facts.kv_len, now[1], new[1])
        pads = sum(max(0.0, padding(n, b).share - padding(n, a).share) for n, a, b in lengths)
        return halvings + PADDING_WEIGHT * pads, -new[0]

    smallest = min(q_choices) if q_choices else facts.q_step, LANES, LANES
    return min(candidates(), key=cost, default=smallest)
