"""Costs of attention in a video made block by block: cache, passes, calls, transfers.

They follow from the sizes of the stream and of its KV cache; no device is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, cast, get_args

import numpy as np

from maxattn._plan import Plan
from maxattn.block_sizes.estimated.choose import estimated_sizes, how_estimated
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.block_sizes.sizes import KernelKind
from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import Collective, itemsize
from maxattn.kernels import computed_call
from maxattn.kernels.auto.tuned_order import HERE, times_for
from maxattn.masks import Full, KeyPadding
from maxattn.sharding import MeshShape, ways
from maxattn.streaming.layout import CacheLayout
from maxattn.tools.known_models import VideoModel
from maxattn.tuned.kernels import milliseconds_of

FLOAT = 4


class StreamStage(NamedTuple):
    """Consecutive blocks that one compiled program makes. `blocks` has the first and last number,
    from 1 (last None: no end); `keys` the fewest and most keys that a block sees. `call` is one
    pass: the whole call on `mesh` if no cache is read, else one device's call, without a mesh.
    """

    name: str
    blocks: tuple[int, int | None]
    keys: tuple[int, int]
    call: Call
    mesh: MeshShape

    @property
    def flops(self) -> tuple[float, float]:
        """Fewest and most FLOPs of one layer's pass, on all devices of `mesh` together."""
        c = self.call
        a_key = 4.0 * c.batch * c.heads * c.q_len * c.head_dim
        return a_key * self.keys[0], a_key * self.keys[1]


@dataclass(frozen=True)
class StreamCosts:
    """Costs of a model that makes videos block by block. A block takes `steps` denoising passes;
    with `clean_pass`, one more pass writes the clean block to the cache. `length` is the number
    of frames of a video (None: no end).
    """

    name: str
    model: VideoModel
    layout: CacheLayout
    batch: int = 1
    dtype: str = "bfloat16"
    steps: int = 4
    clean_pass: bool = True
    length: int | None = None

    def __post_init__(self) -> None:
        self.layout.check_sizes(self.batch, self.kv_heads)

    @property
    def kv_heads(self) -> int:
        return self.model.kv_heads or self.model.heads

    @property
    def passes(self) -> int:
        return self.steps + self.clean_pass

    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame in the cache on each device, for all layers."""
        rows = self._local_batch * self.layout.tokens * self.kv_heads // self.layout.head_ways
        return 2 * self.model.layers * rows * self.model.head_dim * itemsize(self.dtype)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the cache on each device."""
        return self.layout.frames * self.frame_bytes

    @property
    def blocks(self) -> int | None:
        return None if self.length is None else len(self.layout.stream.blocks(self.length))

    @property
    def _local_batch(self) -> int:
        return self.batch // ways("B", self.layout.mesh)

    # ---- calls -----------------------------------------------------------------------------------

    def stages(self) -> Iterator[StreamStage]:
        """Yield a stage for each compiled program of the stream, in the order in which they run."""
        stream, last = self.layout.stream, self.blocks
        own = stream.first_block * stream.tokens_per_frame
        sizes = self.batch, own, own, self.model.heads, self.kv_heads, self.model.head_dim
        mesh = self.layout.mesh
        yield StreamStage("first block", (1, 1), (own, own), Call(*sizes, self.dtype), mesh)
        # `full` is the number of the first block that sees a full cache.
        missing = self.layout.frames - stream.first_block
        full = 1 + max(1, -(-missing // stream.frames_per_block))
        if full > 2 and (last is None or last > 1):
            blocks = 2, full - 1 if last is None else min(full - 1, last)
            call, size = self._reading(is_full=False), stream.frames_per_block
            least, most = (stream.first_block + (n - 1) * size for n in blocks)
            keys = least * self.layout.tokens, most * self.layout.tokens
            yield StreamStage("filling cache", blocks, keys, call, ())
        if last is None or last >= full:
            call = self._reading(is_full=True)
            yield StreamStage("full cache", (full, last), (call.kv_len, call.kv_len), call, ())

    def _reading(self, is_full: bool) -> Call:
        layout, model = self.layout, self.model
        batch, heads = self._local_batch, model.heads // layout.head_ways
        q_len = layout.stream.frames_per_block * layout.stream.tokens_per_frame
        kv_len = layout.frames * layout.tokens
        filled = np.full(batch, kv_len, np.int32)
        mask = Full() if is_full else KeyPadding(filled)
        sizes = batch, q_len, kv_len, heads, self.kv_heads // layout.head_ways, model.head_dim
        return Call(*sizes, self.dtype, mask, return_lse=layout.token_ways > 1)

    # ---- transfers -------------------------------------------------------------------------------

    def moves(self) -> Iterator[Collective]:
        """Yield the transfers of one layer's pass over the cache; bytes are those of one device."""
        ranks, rows = self.layout.ranks, self._rows
        if ranks == 1:
            return
        if self.layout.context == "heads":
            size = 2 * (rows(self.model.heads) + rows(self.kv_heads)) // ranks
            yield Collective("all_to_all", ("context",), "Q, new K,V and out", "forward", size)
            return
        gathered = rows(self.model.heads) + 2 * rows(self.kv_heads)
        yield Collective("all_gather", ("context",), "Q and new K,V", "forward", gathered)
        out = rows(self.model.heads, FLOAT)
        yield Collective("psum_scatter", ("context",), "out in float32", "forward", out)

    def _rows(self, heads: int, size: int = 0) -> int:
        """Return the bytes that a device receives to gather a block's [B, T, heads, H] array."""
        tensor, ranks = dict(self.layout.mesh).get("tensor", 1), self.layout.ranks
        stream = self.layout.stream
        tokens = self._local_batch * stream.frames_per_block * stream.tokens_per_frame
        each = tokens * heads // tensor * self.model.head_dim * (size or itemsize(self.dtype))
        return each * (ranks - 1) // ranks


# ---- times ---------------------------------------------------------------------------------------


class Predicted(NamedTuple):
    """The time of one device's call, and its source in words."""

    seconds: Seconds
    how: str


def forward_time(plan: Plan, config: AttentionConfig) -> Predicted | None:
    """Return the measured, else the estimated time of a forward; None if unknown, or on a mesh."""
    if plan.mesh:
        return None
    kernel, call, target = plan.kernel.for_inference(), plan.padded_call, plan.target
    times = times_for(call, target, config)
    if times and kernel.name in (measured := dict(times.forward)):
        ms = milliseconds_of(measured[kernel.name])
        return Predicted(Seconds(ms / 1e3, ms / 1e3), HERE)
    if target.platform == "tpu" and kernel.name in get_args(KernelKind):
        its = computed_call(kernel.name, call, "tpu")
        found = estimated_sizes(cast(KernelKind, kernel.name), its, target, False)
        how = how_estimated(target.device_kind)
        return Predicted(found.seconds, how) if found else None
    if (estimate := kernel.microseconds(call, target)) is None:
        return None
    seconds = Seconds(estimate[0] / 1e6, estimate[0] / 1e6)
    return Predicted(seconds, "estimated, not run; maxattn tune measures it")
