"""What a ring chooses by its timeline: zig-zag order or contiguous, one way or both ways at once.

Zig-zag evens the work of the ranks, and its permutes take time. Both ways, K and V of the first
half of the heads go to the next rank and those of the second half to the one before: each link
carries half of the bytes of a hop in either direction, in twice as many transfers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import jax

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.ring.torus import TorusSchedule
from maxattn.context_parallel.timeline import Timeline, timeline_of
from maxattn.devices import machine_of
from maxattn.target import Target

if TYPE_CHECKING:
    from maxattn.context_parallel.ring.ring import Ring

EVEN = 1.05  # most work of one device, over the mean, at which nothing need be said
KEY = "ring_direction"
LEAST = 3  # ranks, from which a rank has two neighbours


def choose(ring: Ring, call: Call, config: AttentionConfig, target: Target, parts: int) -> Ring:
    """Return the ring whose step ends first, and why; or refused, where both ways cannot be had.

    Args:
        ring: in contiguous order, one way.
        call: global, not yet padded.
        config: its `ring_direction`, and the kernel that it names.
        target: whose kernels and links count.
        parts: groups of heads that go round one after the other.
    """
    setting, rule = getattr(config, KEY), _rule_against_both(ring, call, target, parts)
    if setting == "both_ways" and rule:
        return replace(ring, refused=Reason("ring", KEY, rule, f"set {KEY}: auto, or one_way"))
    if setting == "both_ways":
        asked = TorusSchedule(both_ways=True)
        ring = replace(ring, schedule=asked, why=(f"both ways: {KEY} asks for it",))
    has_choice = setting == "auto" and target.platform == "tpu" and ring.ring_size >= LEAST

    def in_directions(ring: Ring) -> tuple[Ring, Timeline]:
        one = timeline_of(ring, call, target, config)
        return (
            _one_way_or_both(ring, one, call, config, target, rule) if has_choice else (ring, one)
        )

    if ring.ring_size == 1 or call.mask.is_full:
        return in_directions(ring)[0] if has_choice else ring
    plain, line = in_directions(ring)
    if line.compute <= EVEN * line.mean:
        return plain
    zigzag, even = in_directions(replace(ring, zigzag=True))
    work = (
        f"the slowest devices' work is {even.compute / even.mean:.2f} of the mean, in contiguous"
        f" order {line.compute / line.mean:.2f}"
    )
    if even.compute >= line.compute:
        return replace(plain, why=(f"no zig-zag: with it {work}", *plain.why))
    why = (
        f"zig-zag: {work}; a step takes {_ms(even.end)} with it, of which its permutes cost"
        f" {_ms(even.permutes)}, and {_ms(line.end)} without ({machine_of(target).source})"
    )
    if even.end < line.end:
        return replace(zigzag, why=(why, *zigzag.why))
    return replace(plain, why=(f"no {why}", *plain.why))


def _one_way_or_both(
    ring: Ring, one: Timeline, call: Call, config: AttentionConfig, target: Target, rule: str
) -> tuple[Ring, Timeline]:
    """Return the ring in the directions in which a step ends first, why, and its timeline."""
    padded = ring.padded_call(call)
    if len(ring.hops(padded.mask, padded.q_len, padded.kv_len)) < ring.ring_size:
        return ring, one  # a hop over several ranks, which the other way would be another one
    both = replace(ring, schedule=TorusSchedule(both_ways=True))
    two = timeline_of(both, call, target, config)
    forward, backward = one.forward, one.backward
    hops = (
        f"a hop of K and V takes {_ms(forward.transfer.max())} beside a kernel of"
        f" {_ms(forward.compute.max())}, in training with dK and dV"
        f" {_ms(backward.transfer.max())} beside {_ms(backward.compute.max())}"
        f" ({one.source}; links at their published rate)"
    )
    if two.end >= one.end:
        return replace(ring, why=(f"one way: {hops}",)), one
    exposed = "the exposed transfer time of a step is"
    if rule:
        return replace(ring, why=(f"one way, and {exposed} {_ms(one.exposed)}: {rule}",)), one
    times = f"{exposed} {_ms(two.exposed)}, one way {_ms(one.exposed)}"
    return replace(both, why=(f"both ways: {times}; one way {hops}",)), two


def _rule_against_both(ring: Ring, call: Call, target: Target, parts: int) -> str:
    """Return the rule that a ring in both directions breaks, or ""."""
    n, both = ring.ring_size, f"{KEY}=both_ways"
    if target.platform == "gpu":
        return f"{both} is for links between neighbours, and a GPU reaches every other at once"
    if n < LEAST:
        return f"{both} needs a ring of {LEAST} ranks; this one has {n}, one neighbour each"
    if call.bias is not None:
        return f"{both} divides the heads in halves, and a bias is added to all at once"
    if any("N" in letters for letters in jax.tree.leaves(call.mask.leaf_axes())):
        return f"{both} divides the heads in halves, and the mask has a table for each head"
    # Each half is a whole number of key heads, and of heads for each core of a device.
    core, hop = target.device.core, ring.rank_call(ring.padded_call(call))
    heads, kv_heads = hop.heads // parts, hop.kv_heads // parts
    unit = 2 * (core.cores if core else 1)
    if heads % unit:
        return f"{both} needs a multiple of {unit} heads on each device, and there are {heads}"
    if kv_heads % 2:
        return f"{both} needs an even number of key heads on each device: there are {kv_heads}"
    return ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
