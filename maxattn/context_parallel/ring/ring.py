"""Ring attention: queries stay, K and V go round the devices of the context axis, block by block.

Hop h brings each rank the K and V of the rank h places before it. The backward makes the same hops
with the global output and LSE. A hop that the mask leaves empty on every rank is skipped, and a
rank skips a block that is empty for that rank alone. zigzag.py balances uneven work; schedules in
torus.py and gpu.py decide when blocks and gradients move; choices.py picks order and direction.

Source: Liu et al., Ring Attention with Blockwise Transformers (arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import Collective, Strategy
from maxattn.context_parallel.ring.choices import choose
from maxattn.context_parallel.ring.gpu import GpuSchedule
from maxattn.context_parallel.ring.hops import RingPass
from maxattn.context_parallel.ring.torus import TorusSchedule
from maxattn.context_parallel.ring.zigzag import ChunkLayout, zigzag_collectives
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target


@dataclass(frozen=True)
class Ring(Strategy):
    """Attend to the keys of one rank after another, while the next keys travel.

    Args:
        shape: (axis, size) of each mesh axis.
        schedule: when blocks and their gradients travel.
        group: number of neighbouring devices that form a rank and share its heads (ulysses.py).
        zigzag: whether each rank has two chunks of the sequence, an early and a late one.
        why: the reasons for the order and the directions, a sentence each.
        refused: why the configured `ring_direction` cannot run, if it cannot.
    """

    name: ClassVar[str] = "ring"
    shape: MeshShape
    schedule: TorusSchedule | GpuSchedule = TorusSchedule()  # noqa: RUF009
    group: int = 1
    zigzag: bool = False
    why: tuple[str, ...] = ()
    refused: Reason | None = None

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Self:
        return choose(cls.of_groups(1, shape, target), call, config, target)

    @classmethod
    def of_groups(cls, group: int, shape: MeshShape, target: Target) -> Self:
        """Return a ring in contiguous order, whose ranks are groups of neighbouring devices."""
        on_gpu = target.platform == "gpu"
        return cls(shape, GpuSchedule.build(target) if on_gpu else TorusSchedule(), group)

    def supports(self, call: Call) -> Reason | None:
        return self.refused

    # ---- the layout ------------------------------------------------------------------------------

    @property
    def ring_size(self) -> int:
        """Number of ranks of the ring."""
        return ways("S", self.shape) // self.group

    @property
    def chunks_per_rank(self) -> int:
        return 2 if self.zigzag else 1

    @property
    def layout(self) -> ChunkLayout:
        """The chunks of the sequence that each rank has."""
        return ChunkLayout(self.ring_size, self.chunks_per_rank)

    def unit(self) -> int:
        return super().unit() * self.chunks_per_rank

    def head_ways(self) -> int:
        return super().head_ways() * self.group

    def kv_letter(self) -> str:
        return "S"

    def rank_call(self, call: Call) -> Call:
        """Return the call of one hop: a rank's queries and keys, and a device's heads."""
        local = super().local_call(call)
        q_len, kv_len = (-(-n // self.ring_size) for n in (call.q_len, call.kv_len))
        heads, kv_heads = local.heads // self.group, local.kv_heads // self.group
        return local.derived(q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads)

    def local_call(self, call: Call) -> Call:
        """Return the call of one kernel: a chunk of queries against a chunk of keys."""
        hop, chunks = self.rank_call(call), self.chunks_per_rank
        return hop.derived(q_len=hop.q_len // chunks, kv_len=hop.kv_len // chunks)

    # ---- what `explain` prints -------------------------------------------------------------------

    def label(self) -> str:
        both = ", both ways" if self.schedule.directions > 1 else ""
        return super().label() + (", zig-zag" if self.zigzag else "") + both

    def backward_line(self, kernel: Kernel, call: Call) -> str:
        dense = not self.zigzag and call.mask.is_full and call.bias is None
        return self.schedule.backward_line(kernel, call) if dense and self.ring_size > 1 else ""

    def notes(self) -> tuple[str, ...]:
        return self.why + (self.schedule.notes() if self.ring_size > 1 else ())

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """List the permutes to zig-zag and back, and the hops."""
        hop, each = self.rank_call(call), self.chunks_per_rank
        sends = len(self.layout.hops(call.mask, call.q_len, call.kv_len)) - 1
        moves = zigzag_collectives(self, call) if self.zigzag else ()
        return *moves, *(self.schedule.collectives(hop, sends, each) if sends else ())

    # ---- inside `shard_map` ----------------------------------------------------------------------

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        ring_pass = RingPass(self.layout, self.group, inputs)
        return self.schedule.forward(ring_pass, kernel, inputs)

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        ring_pass = RingPass(self.layout, self.group, inputs)
        return self.schedule.backward(ring_pass, kernel, inputs, rows)
