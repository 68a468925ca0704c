"""`Plan`: how a call runs, as a value. `plan` in decide.py makes it; `attention()` executes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import lcm
from typing import Any

from maxattn.call import Call, Reason
from maxattn.context_parallel.base import (
    Collective,
    Strategy,
    bias_axes,
    bias_collectives,
    itemsize,
    range_collectives,
)
from maxattn.kernels.base import Kernel
from maxattn.masks import KeyLimit, Mask
from maxattn.sharding import LETTERS, MeshShape, ways
from maxattn.target import Target


@dataclass(frozen=True)
class Plan:
    """How a call runs: hashable, comparable, printable, without arrays or devices.

    Args:
        call: the global call.
        padded_call: the call that the strategy splits, padded to whole shards and with repeated
            key heads.
        target: the machine that the plan is for.
        mesh: (axis, size) of every mesh axis that attention uses and whose size is above 1.
        asked: the setting that selects the kernel, such as "attention: auto".
        kernel: the kernel, with its tiles and all other choices.
        strategy: how K, V or heads move between devices (`context_parallel`).
        kv_repeat: how often each key head is repeated to divide over the mesh axis tensor.
        q_len, kv_len: T and S after padding to whole shards.
        because: the reason for the kernel, in a sentence.
        notes: other facts that the user should know, a sentence each.
        refused: why kernels and strategies that the config names or `auto` prefers cannot run.
        fell_back: whether the plan runs another kernel or strategy than the config names.
        fallback: the setting `fallback`: "error", "warn" or "allow".
        arithmetic: the strategy that `context_parallel: auto` chose, and the two shortest times.
        sums: the time and memory of every strategy that `auto` compared, a line each.
        warns: whether the plan is logged as a warning, because a bias, float32 or an untested
            version of a package excludes faster kernels.
    """

    call: Call
    padded_call: Call = field(compare=False, repr=False)
    target: Target
    mesh: MeshShape
    asked: str
    kernel: Kernel
    strategy: Strategy
    kv_repeat: int
    q_len: int
    kv_len: int
    because: str
    notes: tuple[str, ...] = ()
    refused: tuple[Reason, ...] = ()
    fell_back: bool = False
    fallback: str = "error"
    arithmetic: str = ""
    sums: tuple[str, ...] = ()
    warns: bool = False
    _hash: int = field(default=0, init=False, compare=False, repr=False)

    def __hash__(self) -> int:
        if self._hash == 0:
            what = self.kernel, self.strategy, self.asked, self.notes
            facts = (self.call, self.mesh, self.target, *what)
            object.__setattr__(self, "_hash", hash(facts) or 1)
        return self._hash

    @property
    def context(self) -> Strategy:
        """An alias of `strategy`."""
        return self.strategy

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """Every transfer of the plan, forward and backward."""
        call, tensor = self.padded_call, ways("K", self.mesh)
        moved = (
            *self.strategy.collectives(call),
            *bias_collectives(call, self.mesh, self.strategy),
            *range_collectives(self.strategy.local_call(call), self.token_axes),
        )
        if self.call.kv_heads % tensor == 0:
            return moved
        # dK and dV are summed over the devices that hold copies of one key head.
        local, heads = self.strategy.local_call(call), lcm(self.call.kv_heads, tensor) // tensor
        channels = call.head_dim + call.value_dim
        size = local.batch * local.kv_len * heads * channels * itemsize(call.dtype)
        return (
            *moved,
            Collective("psum", ("tensor",), "dK,dV of repeated heads", "backward", size),
        )

    @property
    def bias_axes(self) -> tuple[str, ...]:
        """The mesh axes that the gradient of the bias is summed over."""
        return bias_axes(self.call.bias, self.mesh, self.strategy)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the tokens of a batch row."""
        return tuple(a for a, _ in self.mesh if a in LETTERS["T"])

    def with_notes(self, notes: tuple[str, ...]) -> Plan:
        """Return the plan with additional notes."""
        return _with_notes(self, notes) if notes else self

    def full_mask(self, mask: Mask) -> Mask:
        """Return the caller's bound mask, with padded keys hidden."""
        real = self.call.kv_len
        return mask & KeyLimit(real) if self.kv_len > real else mask

    def __str__(self) -> str:
        return self.explain()

    def explain(self, why: bool = False) -> str:
        """Return a few lines of text: what runs and why, what moves, and what is refused.

        The lines are `asked` (the setting), `runs` (strategy and kernel), `because`, `mask`,
        `shards` (what each device computes), `blocks` (tiles), `moves` (each transfer: arrays,
        operation, mesh axes, bytes that a device receives, and pass), `note` and `refused`.

        Args:
            why: whether to print the time and memory of every strategy that
                `context_parallel: auto` compared; default False.
        """
        from maxattn.explain import explain

        return explain(self, why=why)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values to save beside a checkpoint."""
        from maxattn.explain import to_dict

        return to_dict(self)

    def diff(self, other: Plan | dict[str, Any]) -> tuple[str, ...]:
        """List the differences from another plan or a saved one, as `name: theirs -> ours`."""
        mine, theirs = self.to_dict(), other if isinstance(other, dict) else other.to_dict()
        kept = ((k, v) for k, v in theirs.items() if k not in _DROPPED)
        theirs = {_RENAMED.get(k, k): _renamed(k, v) for k, v in kept}
        keys = [*mine, *(k for k in theirs if k not in mine)]
        pairs = ((k, theirs.get(k), mine.get(k)) for k in keys)
        return tuple(f"{k}: {old} -> {new}" for k, old, new in pairs if old != new)


@lru_cache(maxsize=1024)
def _with_notes(plan: Plan, notes: tuple[str, ...]) -> Plan:
    return replace(plan, notes=(*plan.notes, *notes))


# Older names in saved plans: old key -> key of `to_dict`.
_RENAMED = {"context": "strategy", "kernel.processors": "kernel.sms"}
# Fields in saved plans that kernels do not have.
_DROPPED = ("kernel.tests_pairs", "kernel.lists")


def _renamed(key: str, value: Any) -> Any:
    """Rename the older field names of each kernel in a saved `Pair`; leave out dropped fields."""
    if not (key.startswith("kernel.") and isinstance(value, dict)):
        return value
    names = {k: f"kernel.{k}" for k in value if f"kernel.{k}" not in _DROPPED}
    return {_RENAMED.get(name, name)[7:]: value[k] for k, name in names.items()}
