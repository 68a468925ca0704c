"""Rank the tiles of a call on a TPU that is not there, by the schedules of its kernels.

Each kernel is compiled alone and over few tiles. What is known is taken from a log, so that a run
that was stopped goes on where it was, and shapes with the same tiles share their kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from maxattn.block_sizes import adjust, facts_of
from maxattn.block_sizes.estimated.choose import divides, padded_pairs, price, tiles_of
from maxattn.block_sizes.estimated.grids import evaluates
from maxattn.block_sizes.estimated.step_cost import Costs, Evaluates, Kind, Seconds, StepCost, Tile
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.config import FlashBlockSizes
from maxattn.target import Target
from maxattn.tools.tune.candidates import tile_choices, without_likes
from maxattn.tools.tune.kernel_job import KernelJob
from maxattn.tools.tune.schedules import ScheduleCompiler, ScheduleLog, costs_of

FORWARDS = 2  # of the fastest forward tiles, that a backward's tiles must go with
PATIENCE = 4  # tiles after the fastest that are compiled in vain
PRODUCTS: dict[Kind, int] = {"fwd": 2, "dkv": 4, "fused": 5, "dq": 3}
Say = Callable[[KernelJob, dict[str, Any], bool], None]


@dataclass
class OfflineSearch:
    """Compile tiles of one call, and keep what they cost.

    Args:
        compiler, log: who answers, and what was answered before.
        kernel, call, target: what for.
        limit: tiles of each kernel at most, beside those that run where nothing is set.
        say: is told of each kernel, its answer, and whether that was known before.
        costs, failures: what was found, and why kernels have no schedule.
    """

    compiler: ScheduleCompiler
    log: ScheduleLog
    kernel: KernelKind
    call: Call
    target: Target
    limit: int
    say: Say
    costs: dict[tuple[Kind, Evaluates], dict[Tile, StepCost]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def run(self, training: bool) -> Costs:
        """Return what is known when each kernel of a pass was searched."""
        for each in (False, True) if training else (False,):  # what runs where nothing is set
            sizes, _ = adjust(FlashBlockSizes(), self.call, self.kernel, self.target, each)
            for kind, tile in tiles_of(sizes).items():
                self._cost(kind, tile)
        kinds: tuple[Kind, ...] = ("fwd",)
        if training:
            kinds = ("fwd", "dkv", "dq", "fused") if self.kernel == "flash" else ("fwd", "fused")
        for kind in kinds:
            self._search(kind, training)
        return self.costs

    def _search(self, kind: Kind, training: bool) -> None:
        """Compile tiles until the limit, or until several in turn are no faster."""
        facts = facts_of(self.call, self.kernel, self.target, training)
        every = tile_choices(kind, self.call, facts)
        if kind != "fwd" and self.kernel != "tpu_flash":
            # A backward's tile divides one of the fastest forward's.
            fastest = self._fastest_forwards
            every = [tile for tile in every if any(divides(kind, tile, one) for one in fastest)]
        core = self.target.device.core
        assert core is not None, self.target.device_kind
        best, vain = float("inf"), 0
        choices = without_likes(every, self.call)
        for tile, _ in zip(choices, range(self.limit), strict=False):
            if vain >= PATIENCE:
                return
            # The products at the peak, padding among them.
            pairs = padded_pairs(tile, self.call) * self.call.heads * self.call.batch
            if 2 * PRODUCTS[kind] * pairs * self.call.head_dim / core.peak < best:
                found = self._cost(kind, tile)
                slow = found.slow if found else float("inf")
                best, vain = min(best, slow), 0 if slow < best else vain + 1

    @cached_property
    def _fastest_forwards(self) -> list[Tile]:
        known = {t for (kind, _), tiles in self.costs.items() if kind == "fwd" for t in tiles}
        priced = {t: self._price("fwd", t) for t in known}
        times = {tile: one.slow for tile, one in priced.items() if one}
        return sorted(times, key=lambda tile: times[tile])[:FORWARDS]

    def _cost(self, kind: Kind, tile: Tile) -> Seconds | None:
        """Look one kernel up, or compile it; None where it does not compile."""
        masked = evaluates(self.call, tile)
        what = self.target.device_kind, self.kernel, kind, tile
        job = KernelJob(*what, self.call.head_dim, self.call.dtype, masked)
        answer = self.log.find(job)
        if answer and answer.get("after", float("inf")) < self.compiler.seconds:
            answer = None  # there is more time than there was
        is_known = answer is not None
        if answer is None:
            answer = self.compiler.answer(job)
            self.log.add(job, answer)
        self.say(job, answer, is_known)
        for each, cost in costs_of(kind, answer).items():
            self.costs.setdefault((each, masked), {})[tile] = cost
        if "failed" in answer:
            self.failures.append(answer["failed"])
        return self._price(kind, tile)

    def _price(self, kind: Kind, tile: Tile) -> Seconds | None:
        return price(self.costs, kind, tile, self.call, self.target, self.kernel)
