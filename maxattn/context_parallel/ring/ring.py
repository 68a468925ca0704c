"""Ring attention: queries stay, K and V go round the devices of the context axis, block by block.

Hop h brings each rank the block of the rank h before it. The backward goes round again with the
global output and LSE. Hops that the mask leaves empty on every rank are not made, a rank skips what
is empty for it alone, and uneven work is evened by zig-zag (zigzag.py). When blocks and their
gradients travel, the schedule says: torus.py, gpu.py. What is chosen, and by what: choices.py.

Source: Liu et al., Ring Attention with Blockwise Transformers (arXiv 2310.01889).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import Collective, Strategy
from maxattn.context_parallel.ring.choices import choose
from maxattn.context_parallel.ring.gpu import GpuSchedule
from maxattn.context_parallel.ring.hops import RingPass
from maxattn.context_parallel.ring.schedule import Schedule
from maxattn.context_parallel.ring.torus import TorusSchedule
from maxattn.context_parallel.ring.zigzag import ChunkLayout, zigzag_collectives
from maxattn.kernels.base import Grads, Inputs, Kernel, Result, Rows
from maxattn.masks import Mask
from maxattn.sharding import MeshShape, ways
from maxattn.target import Target


@dataclass(frozen=True)
class Ring(Strategy):
    """Attend to one rank's keys after the other's, while the next ones travel.

    Args:
        shape: the mesh's axes.
        schedule: when blocks and their gradients travel.
        group: neighbouring devices that are one rank and share its heads (ulysses.py).
        zigzag: whether ranks hold two chunks of the sequence each, an early and a late one.
        why: the reasons for the order and the directions, a sentence each.
        refused: why `ring_direction` cannot be had, where it is asked for.
    """

    name: ClassVar[str] = "ring"
    shape: MeshShape
    schedule: Schedule = TorusSchedule()  # noqa: RUF009
    group: int = 1
    zigzag: bool = False
    why: tuple[str, ...] = ()
    refused: Reason | None = None

    @classmethod
    def build(cls, shape: MeshShape, config: AttentionConfig, call: Call, target: Target) -> Ring:
        return cls.of_groups(1, shape, config, call, target)

    @classmethod
    def of_groups(
        cls,
        group: int,
        shape: MeshShape,
        config: AttentionConfig,
        call: Call,
        target: Target,
        parts: int = 1,
    ) -> Ring:
        """Build a ring whose ranks are groups of neighbouring devices.

        Args:
            group: devices of a rank.
            shape: the mesh's axes.
            config: its `ring_direction`, and the kernel that it names.
            call: global, not yet padded.
            target: the machine.
            parts: groups of heads that go round one after the other.
        """
        on_gpu = target.platform == "gpu"
        ring = cls(shape, GpuSchedule.build(target) if on_gpu else TorusSchedule(), group)
        return choose(ring, call, config, target, parts)

    def supports(self, call: Call) -> Reason | None:
        return self.refused

    # ---- the layout ------------------------------------------------------------------------------

    @property
    def ring_size(self) -> int:
        """The ranks of the ring."""
        return ways("S", self.shape) // self.group

    @property
    def chunks_per_rank(self) -> int:
        return 2 if self.zigzag else 1

    @property
    def layout(self) -> ChunkLayout:
        """Which chunks of the sequence each rank holds."""
        return ChunkLayout(self.ring_size, self.chunks_per_rank)

    def unit(self) -> int:
        """Lengths are padded to whole chunks of every device."""
        return super().unit() * self.chunks_per_rank

    def head_ways(self) -> int:
        """Heads are split over tensor, and over the devices of a rank."""
        return super().head_ways() * self.group

    def kv_letter(self) -> str:
        return "S"

    def rank_call(self, call: Call) -> Call:
        """Return the call of one hop: a rank's queries, a rank's keys, a device's heads."""
        local = super().local_call(call)
        q_len, kv_len = (-(-n // self.ring_size) for n in (call.q_len, call.kv_len))
        heads, kv_heads = local.heads // self.group, local.kv_heads // self.group
        return local.derived(q_len=q_len, kv_len=kv_len, heads=heads, kv_heads=kv_heads)

    def local_call(self, call: Call) -> Call:
        """Return the call of one kernel: a chunk of queries against a chunk of keys."""
        hop, chunks = self.rank_call(call), self.chunks_per_rank
        return hop.derived(q_len=hop.q_len // chunks, kv_len=hop.kv_len // chunks)

    def hops(self, mask: Mask, q_len: int, kv_len: int) -> tuple[int, ...]:
        """List the hops in which some rank has something to compute; hop 0 is always made."""
        return self.layout.hops(mask, q_len, kv_len)

    # ---- what `explain` prints -------------------------------------------------------------------

    def label(self) -> str:
        return super().label() + self.order_label

    @property
    def order_label(self) -> str:
        """Name the order, where it is zig-zag, and both directions."""
        both = ", both ways" if self.schedule.directions > 1 else ""
        return (", zig-zag" if self.zigzag else "") + both

    def backward_line(self, kernel: Kernel, call: Call) -> str:
        dense = not self.zigzag and call.mask.is_full and call.bias is None
        return self.schedule.backward_line(kernel, call) if dense and self.ring_size > 1 else ""

    def notes(self) -> tuple[str, ...]:
        return self.why + (self.schedule.notes() if self.ring_size > 1 else ())

    def collectives(self, call: Call) -> tuple[Collective, ...]:
        """Name the permutes to zig-zag and back, and the hops."""
        hop, sends = self.rank_call(call), len(self.hops(call.mask, call.q_len, call.kv_len)) - 1
        moves: tuple[Collective, ...] = ()
        if self.zigzag:
            moves = zigzag_collectives(call, hop, self.shape, self.ring_size, self.head_ways())
        hops = self.schedule.collectives(hop, sends, self.chunks_per_rank) if sends else ()
        return *moves, *hops

    # ---- inside `shard_map` ----------------------------------------------------------------------

    def forward(self, kernel: Kernel, inputs: Inputs) -> Result:
        ring_pass = RingPass(self.layout, self.group, inputs)
        return self.schedule.forward(ring_pass, kernel, inputs)

    def backward(self, kernel: Kernel, inputs: Inputs, rows: Rows) -> Grads:
        ring_pass = RingPass(self.layout, self.group, inputs)
        return self.schedule.backward(ring_pass, kernel, inputs, rows)
