"""Choose a ring's order (zig-zag or contiguous) and direction (one or both) by its timeline.

Zig-zag gives all ranks the same work, but its permutes take time. If a ring runs in both
directions, K and V of the first half of the heads go to the next rank, and those of the second half
to the previous rank: a link carries half of a hop's bytes each way, in twice as many transfers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import jax

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.ring.torus import TorusSchedule
from maxattn.context_parallel.timeline import Timeline, timeline_of
from maxattn.devices import machine_of
from maxattn.target import Target

if TYPE_CHECKING:
    from maxattn.context_parallel.ring.ring import Ring

R = TypeVar("R", bound="Ring")
EVEN = 1.05  # zig-zag is considered above this ratio of the slowest rank's work to the mean
KEY = "ring_direction"
LEAST = 3  # fewest ranks at which a rank has two neighbours


def choose(ring: R, call: Call, config: AttentionConfig, target: Target) -> R:
    """Return the variant of `ring` with the shortest step for an unpadded call, and the reasons.

    `ring` itself is in contiguous order and in one direction. If `ring_direction` requires both
    directions and they cannot run, the result has a reason in `refused`.
    """
    setting, rule = getattr(config, KEY), _rule_against_both(ring, call, target)
    if setting == "both_ways" and rule:
        return replace(ring, refused=Reason("ring", KEY, rule, f"set {KEY}: auto, or one_way"))
    if setting == "both_ways":
        schedule = TorusSchedule(both_ways=True)
        ring = replace(ring, schedule=schedule, why=(f"both ways: {KEY} is both_ways",))
    has_choice = setting == "auto" and target.platform == "tpu" and ring.ring_size >= LEAST

    def in_directions(ring: R) -> tuple[R, Timeline]:
        one = timeline_of(ring, call, target, config)
        if not has_choice:
            return ring, one
        return _one_way_or_both(ring, one, call, config, target, rule)

    if ring.ring_size == 1 or call.mask.is_full:
        return in_directions(ring)[0] if has_choice else ring
    plain, line = in_directions(ring)
    if line.compute <= EVEN * line.mean:
        return plain
    zigzag, even = in_directions(replace(ring, zigzag=True))
    work = (
        f"the slowest device has {even.compute / even.mean:.2f} times the mean work, and"
        f" {line.compute / line.mean:.2f} times in contiguous order"
    )
    if even.compute >= line.compute:
        return replace(plain, why=(f"no zig-zag: with it {work}", *plain.why))
    why = (
        f"zig-zag: with it {work}; a step takes {_ms(even.end)}, {_ms(even.permutes)} of it for"
        f" permutes, and {_ms(line.end)} in contiguous order ({machine_of(target).source})"
    )
    if even.end < line.end:
        return replace(zigzag, why=(why, *zigzag.why))
    return replace(plain, why=(f"no {why}", *plain.why))


def _one_way_or_both(
    ring: R, one: Timeline, call: Call, config: AttentionConfig, target: Target, rule: str
) -> tuple[R, Timeline]:
    """Choose one direction or both by the shorter step; return the ring and its timeline."""
    if len(one.forward.compute) < ring.ring_size:
        return ring, one  # the ring skips hops, and would need others in the other direction
    both = replace(ring, schedule=TorusSchedule(both_ways=True))
    two = timeline_of(both, call, target, config)
    forward, backward = one.forward, one.backward
    hops = (
        f"a hop sends K and V in {_ms(forward.transfer.max())} beside a kernel of"
        f" {_ms(forward.compute.max())}, and in the backward K, V, dK and dV in"
        f" {_ms(backward.transfer.max())} beside {_ms(backward.compute.max())}"
        f" ({one.source}; links at their published rate)"
    )
    if two.end >= one.end:
        return replace(ring, why=(f"one way: {hops}",)), one
    exposed = "the exposed transfer time of a step is"
    if rule:
        return replace(ring, why=(f"one way: {rule}; {exposed} {_ms(one.exposed)}",)), one
    times = f"{exposed} {_ms(two.exposed)}, and {_ms(one.exposed)} one way"
    return replace(both, why=(f"both ways: {times}; one way, {hops}",)), two


def _rule_against_both(ring: Ring, call: Call, target: Target) -> str:
    n, both = ring.ring_size, f"{KEY}=both_ways"
    if target.platform == "gpu":
        return f"{both} is for links between neighbours, and each GPU reaches all others directly"
    if n < LEAST:
        return f"{both} needs a ring of at least {LEAST} ranks, and this ring has {n}"
    if call.bias is not None:
        return f"{both} splits the heads in halves, and supports no bias"
    if any("N" in letters for letters in jax.tree.leaves(call.mask.leaf_axes())):
        return f"{both} splits the heads in halves, and supports no mask with a head axis"
    # Each half must have whole key heads, and equally many heads for each core of a device.
    core, hop = target.device.core, ring.kernel_call(ring.rank_call(ring.padded_call(call)))
    unit = 2 * (core.cores if core else 1)
    if hop.heads % unit:
        return f"{both} needs a multiple of {unit} heads on each device, and there are {hop.heads}"
    if hop.kv_heads % 2:
        return f"{both} needs an even number of key heads on each device, not {hop.kv_heads}"
    return ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
