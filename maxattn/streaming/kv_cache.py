"""`KVCache`: the keys and values of earlier frames, as a value that programs take and return."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp

from maxattn.jax_private.mesh import is_tracer
from maxattn.sharding import check_devices, mesh_shape, usable_mesh
from maxattn.streaming import checks
from maxattn.streaming.begun import register_cache
from maxattn.streaming.layout import CacheLayout

if TYPE_CHECKING:
    from jaxtyping import Array, Int

    from maxattn.streaming.stream import Stream

Stage = Literal["empty", "filling", "full", "done", "complete"]
Mode = Literal["stream", "extract", "cached"]


@dataclass(frozen=True, eq=False, repr=False)
class KVCache:
    """Keys and values of the frames that a block sees, for all layers.

    It is a frozen pytree: attention takes a layer of it and returns the whole cache with that layer
    changed. Under `jax.jit` with `donate_argnums` the change is made in place. Each frame has a
    slot; a new frame takes the slot of the oldest frame after the sink. Slots are computed on the
    device from `frame`, so one program serves all blocks of a `stage`.

    Args:
        k, v: keys and values [L, B, S, K, H]: L layers, S the tokens of all slots. Or a tuple with
            an array [1, B, S, K, H] for each layer, for layers that are not scanned.
        frame: the first frame of the current block: a number, or an array [B] for batch rows.
        until: while kept frames are recomputed, the frame at which the video continues; else 0.
            It has the shape of `frame`.
        layout: the stream, the slots, and how they are split over a mesh.
        own: number of frames of the current block.
        stage: "empty" before the first block is done; "filling"; "full" once the current block and
            earlier ones fill every slot. Without a window also "complete", if every slot has a
            frame, and "done", if too few slots are left for a block.
        mode: "stream", "extract" or "cached".
        start: the first token that `extract` keeps.
        keeps: whether passes write; False after `unwritten`.

    >>> stream = ma.Stream(tokens_per_frame=4, frames_per_block=3, window=2)
    >>> sizes = dict(layers=1, batch=1, kv_heads=2, dim_head=8, dtype="float32")
    >>> cache = ma.KVCache.empty(stream, **sizes)
    >>> cache
    KVCache(float32[1,1,24,2,8], frame 0, 6 slots, empty)
    >>> attn = ma.FlaxAttention(16, heads=2, dim_head=8, rngs=nnx.Rngs(0))
    >>> for block in range(3):
    ...     y, cache = attn(jnp.ones((1, 12, 16)), cache=cache.layer(0))
    ...     cache = cache.advance()
    >>> cache
    KVCache(float32[1,1,24,2,8], frame 9, 6 slots, full)
    """

    k: Any  # Float[Array, "L B S K H"], or a tuple of Float[Array, "1 B S K H"]
    v: Any
    frame: Int[Array, ""] | Int[Array, " B"]
    until: Int[Array, ""] | Int[Array, " B"]
    layout: CacheLayout
    own: int = 1
    stage: Stage = "empty"
    mode: Mode = "stream"
    start: int = 0
    keeps: bool = True
    is_begun: ClassVar[bool] = False

    @classmethod
    def empty(
        cls,
        stream: Stream,
        *,
        layers: int,
        batch: int,
        kv_heads: int,
        dim_head: int,
        dtype: Any = "bfloat16",
        mesh: Any = None,
        frames: int | None = None,
        positions: str = "absolute",
        context: str = "heads",
        per_layer: bool = False,
    ) -> Self:
        """Make an empty cache.

        Args:
            stream: blocks, window and sink.
            layers, batch, kv_heads, dim_head: L, B, K and H.
            dtype: dtype of the module's projections; default bfloat16.
            mesh: mesh of the modules: batch over data and fsdp, heads over tensor; default the
                surrounding mesh, if there is one.
            frames: for a stream without a window, the most frames of the video.
            positions: "absolute" (default): `rotary_emb` has the angles of the block, and keys are
                kept rotated. "slots": keys are kept unrotated, and `rotary_emb` has the angles of
                the window for every block. "slots_with_sink": the same, with a sink.
            context: which axis is split over context devices, "heads" (default) or the "tokens" of
                each frame. "heads" transfers Q and the new K and V; "tokens" transfers Q and out.
            per_layer: False (default): one array for all layers, for a scan over layers. True: an
                array for each layer, which GPU kernels read without a copy.

        Raises:
            InputError: a size, dtype or name is invalid.
            MeshError: a size does not divide over the mesh.
        """
        layers, batch, kv_heads, dim_head = checks.sizes(
            layers=layers, batch=batch, kv_heads=kv_heads, dim_head=dim_head
        )
        name, mesh = checks.dtype(dtype), usable_mesh(mesh)
        check_devices(mesh, None)
        slots = checks.slots(stream, frames)
        layout = CacheLayout(stream, slots, positions, mesh_shape(mesh), context)
        layout.check_sizes(batch, kv_heads)
        of_layer = (batch, slots * stream.tokens_per_frame, kv_heads, dim_head)

        def zeros() -> Any:
            leading = [1] * layers if checks.per_layer(per_layer) else [layers]
            made = tuple(layout.zeros((n, *of_layer), name, ".BFK.", mesh) for n in leading)
            return made if per_layer else made[0]

        frame, until = (layout.zeros((), "int32", "", mesh) for _ in range(2))
        return cls(zeros(), zeros(), frame, until, layout, stream.first_block)._begun()

    # ---- arguments of attention ------------------------------------------------------------------

    def layer(self, index: int | Int[Array, ""]) -> CacheLayer:
        """Return a layer for `FlaxAttention(..., cache=)`.

        `index` may be traced, in a scan over layers that carries the cache; with `per_layer=True`
        it must be a number. A traced index of no layer makes the pass's keys and values NaN.
        """
        checks.layer(index, self.shape[0], self.is_per_layer)
        return CacheLayer(self, index)

    @property
    def is_per_layer(self) -> bool:
        """Whether each layer has separate arrays."""
        return isinstance(self.k, tuple)

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, B, S, K, H] of the keys of all layers."""
        first, *others = jax.tree.leaves(self.k)
        return (first.shape[0] + len(others), *first.shape[1:])

    @property
    def dtype(self) -> Any:
        """The dtype of keys and values."""
        return jax.tree.leaves(self.k)[0].dtype

    @property
    def tokens(self) -> int:
        """Number of tokens of the current block."""
        return self.own * self.layout.stream.tokens_per_frame

    @property
    def is_done(self) -> bool:
        """Whether no slots are left for another block; always False with a window."""
        return self.stage in ("done", "complete")

    @property
    def is_written(self) -> bool:
        """Whether passes write to this cache."""
        return self.keeps and self.mode != "cached"

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on all devices together."""
        return 2 * math.prod(self.shape) * self.dtype.itemsize

    # ---- from block to block ---------------------------------------------------------------------

    def prefix(self, frames: int) -> Self:
        """Let the first pass take the clean frames of several blocks at once.

        Args:
            frames: number of frames; 1 for an image, in a stream with `first_frame_alone`.

        Raises:
            InputError: the cache has frames already, or `frames` does not fill whole blocks.
        """
        return replace(self, own=checks.prefix(self, frames))._begun(self)

    def unwritten(self) -> Self:
        """Return the cache for a noisy pass over the first block, which then does not write.

        The first block attends to itself alone, so only its last pass, over clean frames, must
        write. Passes over later blocks must write, since they read their own keys from the cache.

        Raises:
            InputError: the cache has frames already, or the pass extracts.
        """
        checks.unwritten(self)
        return replace(self, keeps=False)._begun(self)

    def advance(self) -> Self:
        """Advance to the next block, after the pass that wrote this block's clean keys and values.

        While the cache fills, the stage is computed from `frame`, read from the device. Under `jit`
        it cannot be read: the stage stays "filling", which is correct for every frame. A second
        `advance` is refused, also after a jitted function that ended with one. It is not refused
        inside the next jitted function, which runs the same program for both caches.

        Raises:
            InputError: passes only read this cache, no pass has written to it yet (a second
                `advance` would skip frames), or it has no slots for the block.
        """
        checks.advance(self)
        frame, size, stage = self.frame + self.own, self.layout.stream.frames_per_block, self.stage
        if stage == "empty":
            stage = self._stage_at(self.own, self.own)
        elif not is_tracer(frame) and (stage != "full" or self.layout.stream.window is None):
            stage = self._stage_at(*_ends(frame))
        after = replace(self, frame=frame, own=size, stage=stage, mode="stream", start=0)
        return after._begun()

    def _begun(self, of: KVCache | None = None) -> Self:
        """Mark this cache as not yet written to, or copy the mark of the cache `of`."""
        object.__setattr__(self, "is_begun", of is None or of.is_begun)
        return self

    def _stage_at(self, least: int, most: int) -> Stage:
        """Return the stage if the next blocks of batch rows begin at frames `least` to `most`."""
        size, slots = self.layout.stream.frames_per_block, self.layout.frames
        if self.layout.stream.window is None and most + size > slots:
            return "complete" if least == slots else "done"
        return "full" if least + size >= slots else "filling"

    @classmethod
    def stacked(cls, caches: Iterable[KVCache]) -> KVCache:
        """Join caches of one layout along the batch; each batch row continues at its own frame.

        Raises:
            InputError: a value is no cache, the caches differ in layout or layers, a first block is
                not done, or frames are being recomputed; under `jit` such rows become NaN.
        """
        caches = checks.stacked(caches)
        k, v = jax.tree.map(lambda *x: jnp.concatenate(x, 1), *map(_complete, caches))
        rows = [jnp.broadcast_to(c.frame, (c.shape[1],)) for c in caches]
        frame = jnp.concatenate(rows)
        both = replace(caches[0], k=k, v=v, frame=frame, until=jnp.zeros_like(frame))
        stages, waits = {c.stage for c in caches}, any(c.is_begun for c in caches)
        if not is_tracer(frame):
            stages = {both._stage_at(*_ends(frame))}
        both = replace(both, stage=stages.pop() if len(stages) == 1 else "filling")
        return both._begun() if waits else both

    # ---- recompute the kept frames ---------------------------------------------------------------

    def refill(self) -> Self:
        """Begin to recompute the kept frames for another prompt, in the memory of this cache.

        The kept frames are `stream.kept(frame)`. Run them block by block like a video's first
        frames, but with their frame numbers as positions, and call `refilled`. Once the window has
        dropped frames, all these blocks have `frames_per_block` frames.

        Raises:
            InputError: the cache is empty, or passes only read it.
        """
        checks.refill(self)
        layout = self.layout
        if int(self.frame) > layout.frames:
            # The kept frames begin within a block, so blocks are counted from their end.
            layout = replace(layout, stream=replace(layout.stream, first_frame_alone=False))
        frame, until = jnp.zeros_like(self.frame), jnp.copy(self.frame)
        how = {"layout": layout, "own": layout.stream.first_block, "stage": "empty"}
        return replace(self, frame=frame, until=until, **how)._begun()

    def refilled(self, stream: Stream, frame: int) -> Self:
        """Mark the recomputed frames as the last ones of `stream` before `frame`.

        If the window has dropped frames, the cache is copied, to move frames to their slots.

        Args:
            stream: the stream that the cache was made for.
            frame: the frame of the cache before `refill`.

        Raises:
            InputError: the stream or the frame is another one, the cache is not from `refill`, or
                not all kept frames are recomputed.
        """
        checks.refilled(self, stream, frame)
        layout = replace(self.layout, stream=stream)
        k, v = self.k, self.v
        if behind := frame - len(stream.kept(frame)):
            k, v = jax.tree.map(lambda x: layout.turned(x, behind), (k, v))
        at, until = jnp.full_like(self.frame, frame), jnp.zeros_like(self.until)
        return replace(self, k=k, v=v, layout=layout, frame=at, until=until)._begun()

    # ---- tokens that never change ----------------------------------------------------------------

    def extract(self, start: int = 0) -> Self:
        """Let the next pass attend as without a cache, and keep keys and values of some tokens.

        The pass keeps as many tokens as the first block, or `prefix(frames)`, has, such as those of
        reference images or of a prompt's prefix. The pass may have a mask and a bias.

        Args:
            start: index of the first kept token in the sequence; default 0.

        Raises:
            InputError: the cache is not empty, is unwritten, or keeps keys unrotated.
        """
        return replace(self, mode="extract", start=checks.extract(self, start))._begun(self)

    def cached(self) -> Self:
        """Let passes only read: queries see the kept tokens and the pass's own tokens.

        Raises:
            InputError: the cache is empty, or keys are kept without their rotary embedding.
        """
        checks.cached(self)
        slots = self.layout.frames
        known = self.stage != "complete" and not is_tracer(self.frame)
        full = self.stage == "complete" or (known and _ends(self.frame)[0] >= slots)
        return replace(self, mode="cached", stage="full" if full else "filling")

    def append(self, other: KVCache) -> KVCache:
        """Return a cache for reading, with the tokens of this cache, then those of another.

        Raises:
            InputError: the layouts differ in more than the number of slots, or slots are empty.
        """
        checks.append(self, other)
        slots = self.layout.frames + other.layout.frames
        k, v = jax.tree.map(self.layout.joined, (self.k, self.v), (other.k, other.v))
        layout = replace(self.layout, frames=slots)
        return replace(self, k=k, v=v, frame=self.frame + other.frame, layout=layout)

    def __repr__(self) -> str:
        known = isinstance(self.frame, jax.Array) and not is_tracer(self.frame)
        frame = self.frame.tolist() if known and not self.frame.is_deleted() else "unknown"
        # jax maps over caches and puts shardings, axes or None in place of arrays.
        first = self.k[0] if self.is_per_layer else self.k
        shape, dtype = "?", type(first).__name__
        if hasattr(first, "shape"):
            shape, dtype = ",".join(map(str, self.shape)), self.dtype
        mode = "" if self.mode == "stream" else f", {self.mode}"
        mode += "" if self.keeps else ", unwritten"
        of = f"frame {frame}, {self.layout.frames} slots, {self.stage}{mode}"
        return f"KVCache({dtype}[{shape}], {of})"


register_cache(KVCache, static=("layout", "own", "stage", "mode", "start", "keeps"))


class CacheLayer(NamedTuple):
    """One layer of a cache; the index may be traced."""

    cache: KVCache
    index: Any

    @property
    def arrays(self) -> tuple[Array, Array, Int[Array, ""]]:
        """Keys and values [L, B, S, K, H] that contain this layer, and its index on axis 0."""
        k, v = self.cache.k, self.cache.v
        if self.cache.is_per_layer:
            return k[self.index], v[self.index], jnp.zeros((), jnp.int32)
        return k, v, jnp.asarray(self.index, jnp.int32)

    def changed(self, k: Array, v: Array) -> KVCache:
        """Return the cache with k and v in place of the first two `arrays`."""
        cache, i = self
        if not cache.is_per_layer:
            return replace(cache, k=k, v=v)
        both = [(*old[:i], new, *old[i + 1 :]) for old, new in ((cache.k, k), (cache.v, v))]
        return replace(cache, k=both[0], v=both[1])


def _complete(cache: KVCache) -> tuple[Any, Any]:
    """Return keys and values; where a traced `until` shows a recomputation, they are NaN."""
    if not is_tracer(cache.until):
        return cache.k, cache.v
    fits = (cache.until == 0).reshape(1, -1, 1, 1, 1)
    return jax.tree.map(lambda x: jnp.where(fits, x, jnp.nan), (cache.k, cache.v))


def _ends(frame: Array) -> tuple[int, int]:
    """Return the least and the largest frame of the batch rows, read from the device."""
    numbers = jax.device_get(frame)
    return int(numbers.min()), int(numbers.max())
