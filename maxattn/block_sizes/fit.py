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
    return _changed(
        sizes, FORWARD, _shrunk(now, "forward", facts, range(LANES, now[1] + 1, LANES), None)
    )


def dkv(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    """Return the sizes of the backward of K and V that fit; block_q shrinks too when fused."""
    now = sizes.part(DKV)
    if now is None:
        return {}
    fused = bool(sizes.use_fused_bwd_kernel)
    q_choices = None if fused else divisors(sizes.block_q, facts.q_step)
    best = _shrunk(
        now, "fused" if fused else "dkv", facts, divisors(sizes.block_kv, LANES), q_choices
    )
    changed = _changed(sizes, DKV, best)
    return (
        {**changed, "block_q": changed["block_q_dkv"]}
        if fused and "block_q_dkv" in changed
        else changed
    )


def dq(sizes: BlockSizes, facts: Facts) -> dict[str, Any]:
    """Return the sizes of the separate backward of Q that fit."""
    now = sizes.part(DQ)
    if now is None:
        return {}
    choices = divisors(sizes.block_q, facts.q_step), divisors(sizes.block_kv, LANES)
    best = _shrunk((now[0], now[1], now[1]), "dq", facts, choices[1], choices[0])
    return _changed(sizes, DQ, best[:2])


def _changed(sizes: BlockSizes, keys: tuple[str, ...], values: Iterable[int]) -> dict[str, Any]:
    return {key: new for key, new in zip(keys, values, strict=True) if new != getattr(sizes, key)}


def _shrunk(
    now: tuple[int, ...],
    part: Part,
    facts: Facts,
    kv_choices: Iterable[int],
    q_choices: list[int] | None,
) -> Tiles:
    """Return the cheapest tiles that fit, or the smallest where none do.

    Args:
        now: q, kv, kv_compute.
        part: the kernel.
        kv_choices: what kv may become.
        q_choices: what q may become; None: any multiple of its step.
    """
    start: Tiles = now[0], now[1], now[2]
    if facts.chip is None or fits(part, start, facts):
        return start
    found = _candidates(start, part, facts, kv_choices, q_choices)
    smallest = min(q_choices) if q_choices else facts.q_step, LANES, LANES
    return min(found, key=lambda tiles: _cost(start, tiles, facts), default=smallest)


def _candidates(
    now: Tiles, part: Part, facts: Facts, kv_choices: Iterable[int], q_choices: list[int] | None
) -> Iterator[Tiles]:
    for kv in kv_choices:
        if kv > now[1]:
            break
        for compute in [kv] if part == "dq" else divisors(kv, LANES):
            q = _longest(now[0], longest_q(part, kv, compute, facts), q_choices, facts.q_step)
            if q > 0 and (compute <= now[2] or part == "dq"):
                yield q, kv, compute


def _longest(asked: int, most: int, choices: list[int] | None, step: int) -> int:
    most = min(asked, most)
    return (
        most // step * step
        if choices is None
        else max((q for q in choices if q <= most), default=0)
    )


def _cost(now: Tiles, new: Tiles, facts: Facts) -> tuple[float, int]:
    """Measure a change: halvings of the three sizes, and padding; ties keep the longer Q."""
    halvings = sum(log2(a / b) for a, b in zip(now, new, strict=True))
    lengths = (facts.q_len, now[0], new[0]), (facts.kv_len, now[1], new[1])
    pads = sum(max(0.0, padding(n, b).share - padding(n, a).share) for n, a, b in lengths)
    return halvings + PADDING_WEIGHT * pads, -new[0]
