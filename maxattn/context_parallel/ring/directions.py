"""In which directions the blocks of a ring travel: one way, or both ways at once.

Both ways, K and V of the first half of the heads go to the next rank and those of the second half
to the one before. Each link then carries half of the bytes of a hop in either direction, beside the
same kernels. Of the local block the backward computes the first half of the heads before all
others and the second half after them, as one way does (head_halves.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import jax

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.ring.hop_times import HopTimes, hop_times
from maxattn.context_parallel.ring.zigzag import ChunkLayout
from maxattn.context_parallel.ring.zigzag_pays import Ranks
from maxattn.devices import START
from maxattn.masks import Mask
from maxattn.sharding import ways
from maxattn.target import Target

KEY = "ring_direction"
_BOTH = f"{KEY}=both_ways"
LEAST = 3  # ranks, from which a rank has two neighbours


@dataclass(frozen=True)
class Directions:
    """Hold the decision.

    Args:
        both: whether halves of the heads go round in opposite directions.
        why: one sentence; empty where there is nothing to say.
    """

    both: bool = False
    why: str = ""

    @property
    def count(self) -> int:
        """In how many directions blocks travel."""
        return 2 if self.both else 1


ONE_WAY = Directions()


class RingQuestion(NamedTuple):
    """Hold what the decision depends on.

    Args:
        ranks: of the ring.
        layout: which chunks they hold.
        call: global, not yet padded.
        config: its `ring_direction`, and the kernel that it names.
        target: whose kernels and links count.
        parts: groups of heads that go round one after the other.
    """

    ranks: Ranks
    layout: ChunkLayout
    call: Call
    config: AttentionConfig
    target: Target
    parts: int = 1


def choose_directions(asked: RingQuestion) -> tuple[Directions, Reason | None]:
    """Decide, and say why both ways cannot be had where they are asked for."""
    setting, rule = getattr(asked.config, KEY), _rule_against(asked)
    if setting == "both_ways":
        refused = Reason("ring", KEY, rule, f"set {KEY}: auto, or one_way") if rule else None
        return Directions(not rule, f"both ways: {KEY} asks for it"), refused
    on_tpu = asked.target.platform == "tpu"
    if setting == "one_way" or not on_tpu or asked.ranks.ring_size < LEAST:
        return ONE_WAY, None
    return _faster(asked, rule), None


def _rule_against(asked: RingQuestion) -> str:
    """Return the rule that a ring in both directions breaks, or ""."""
    n, call = asked.ranks.ring_size, asked.call
    if asked.target.platform == "gpu":
        return f"{_BOTH} is for links between neighbours, and a GPU reaches every other at once"
    if n < LEAST:
        return f"{_BOTH} needs a ring of {LEAST} ranks; this one has {n}, one neighbour each"
    if call.bias is not None:
        return f"{_BOTH} divides the heads in halves, and a bias is added to all at once"
    if any("N" in letters for letters in jax.tree.leaves(call.mask.leaf_axes())):
        return f"{_BOTH} divides the heads in halves, and the mask has a table for each head"
    return _rule_of_heads(asked)


def _rule_of_heads(asked: RingQuestion) -> str:
    """Each half is a whole number of key heads, and of heads for each core of a device."""
    call, core = asked.call, asked.target.device.core
    shares = ways("N", asked.ranks.shape) * asked.ranks.group
    kv_heads = lcm(call.kv_heads, shares) // shares // asked.parts
    heads, unit = call.heads // shares // asked.parts, 2 * (core.cores if core else 1)
    if heads % unit:
        return f"{_BOTH} needs a multiple of {unit} heads on each device, and there are {heads}"
    if kv_heads % 2:
        return f"{_BOTH} needs an even number of key heads on each device: there are {kv_heads}"
    return ""


def _faster(asked: RingQuestion, rule: str) -> Directions:
    """Take both ways where a step waits less for links, by more than what more transfers cost."""
    call, n = asked.call, asked.ranks.ring_size
    if len(asked.layout.hops(*_bound(asked))) < n:
        return ONE_WAY  # a hop over several ranks, which the other way would be another one
    times = hop_times(asked.ranks, asked.layout, call, asked.config, asked.target)
    one, both = times.waits(1), times.waits(2)
    starts = (6 * n - 4) * START  # of a step's transfers, which are twice as many
    source = f"{times.source}; links at their published rate"
    if one - both <= starts:
        return Directions(False, f"one way: {_beside(times)} ({source})")
    if rule:
        return Directions(False, f"one way, and a step waits {_ms(one)} for links: {rule}")
    waits = f"a step waits {_ms(both)} for links, one way {_ms(one)}"
    return Directions(True, f"both ways: {waits}; one way {_beside(times)} ({source})")


def _bound(asked: RingQuestion) -> tuple[Mask, int, int]:
    call, unit = asked.call, asked.layout.chunks
    q_len, kv_len = (-(-n // unit) * unit for n in (call.q_len, call.kv_len))
    return call.mask, q_len, kv_len


def _beside(times: HopTimes) -> str:
    forward, backward = (_ms(float(kernel.max())) for kernel in (times.forward, times.backward))
    keys, all_of_them = _ms(times.hop), _ms(times.hop + times.home)
    return (
        f"a hop of K and V takes {keys} beside a kernel of {forward}, in training with dK and dV"
        f" {all_of_them} beside {backward}"
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
