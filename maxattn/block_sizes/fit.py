"""Shrink the tiles of one kernel until they fit VMEM, and no further than that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import log2
from typing import Any

from maxattn.block_sizes.padding import padding
from maxattn.block_sizes.sizes import DKV, DQ, FORWARD, LANES, BlockSizes, Facts, divisors
from maxattn.block_sizes.vmem import Part, fits, longest_q

Tiles = tuple[int, int, int]  # q, kv, kv_compute
PADDING_WEIGHT = 8.0  # a size that pads 10% more costs as much as one that is half as long


def forward(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    """Return the forward sizes that fit, where the given ones do not."""
    now = sizes.block_q, sizes.block_kv, sizes.block_kv_compute
    best = _shrunk(now, "forward", facts, range(LANES, now[1] + 1, LANES), None)
    return _changed(sizes, FORWARD, best)


def dkv(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    """Return the sizes of the backward of K and V that fit; block_q shrinks too when fused."""
    now = sizes.part(DKV)
    if now is None:
        return {}
    fused = bool(sizes.use_fused_bwd_kernel)
    q_choices = None if fused else divisors(sizes.block_q, facts.q_step)
    kv_choices = divisors(sizes.block_kv, LANES)
    best = _shrunk(
        (now[0], now[1], now[2]), "fused" if fused else "dkv", facts, kv_choices, q_choices
    )
    changed = _changed(sizes, DKV, best)
    if fused and "block_q_dkv" in changed:
        changed["block_q"] = changed["block_q_dkv"]
    return changed


def dq(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    """Return the sizes of the separate backward of Q that fit."""
    now = sizes.part(DQ)
    if now is None:
        return {}
    q_choices, kv_choices = divisors(sizes.block_q, facts.q_step), divisors(sizes.block_kv, LANES)
    best = _shrunk((now[0], now[1], now[1]), "dq", facts, kv_choices, q_choices)
    return _changed(sizes, DQ, best[:2])


def _changed(sizes: BlockSizes, keys: tuple[str, ...], values: Iterable[int]) -> dict[str, Any]:
    return {key: new for key, new in zip(keys, values, strict=True) if new != getattr(sizes, key)}


def _shrunk(
    now: Tiles, part: Part, facts: Facts, kv_choices: Iterable[int], q_choices: list[int] | None
) -> Tiles:
    """Return the cheapest tiles that fit, or the smallest where none do.

    Args:
        now: q, kv, kv_compute.
        part: the kernel.
        kv_choices: what kv may become, in rising order.
        q_choices: what q may become; None: any multiple of its step.
    """
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
        """Count halvings of the three sizes, and padding; of equal ones the longer Q is kept."""
        halvings = sum(log2(a / b) for a, b in zip(now, new, strict=True))
        lengths = (facts.q_len, now[0], new[0]), (facts.kv_len, now[1], new[1])
        pads = sum(max(0.0, padding(n, b).share - padding(n, a).share) for n, a, b in lengths)
        return halvings + PADDING_WEIGHT * pads, -new[0]

    smallest = min(q_choices) if q_choices else facts.q_step, LANES, LANES
    return min(candidates(), key=cost, default=smallest)
