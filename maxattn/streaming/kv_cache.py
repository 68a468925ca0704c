"""`KVCache`: the keys and values of earlier frames, as a value that programs take and return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self

import jax
import jax.numpy as jnp

from maxattn.jax_private.mesh import is_tracer
from maxattn.sharding import mesh_shape, usable_mesh
from maxattn.streaming import checks
from maxattn.streaming.layout import CacheLayout

if TYPE_CHECKING:
    from jaxtyping import Array, Int

    from maxattn.streaming.stream import Stream

Stage = Literal["empty", "filling", "full", "done", "complete"]
Mode = Literal["stream", "extract", "cached"]

STATIC = {"static": True}  # parts of the structure, which compiled programs differ by


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False, repr=False)
class KVCache:
    """Keys and values of the frames that a block sees, for all layers.

    It is a frozen pytree: attention takes a layer of it and returns the whole cache with that layer
    changed. Under `jax.jit` with `donate_argnums` the change is made in place. Each frame has a
    slot; a new frame takes the slot of the oldest frame behind the sink. Slots are computed on the
    device from `frame`, so that one program serves every block; `stage` chooses among three.

    Args:
        k, v: keys and values [L, B, S, K, H]: L layers, S the tokens of all slots. Or a tuple with
            an array [1, B, S, K, H] for each layer, for layers that are not scanned.
        frame: the first frame of the block that is being made: a number, or one a batch row, [B].
        layout: the stream, the slots, and how they are split over a mesh.
        own: how many frames the block that is being made has.
        stage: "empty" before the first block is done; "filling"; "full" once a block and those
            before it fill every slot. Without a window also "complete", if every slot has a frame,
            and "done", if the slots that are left are too few for a block.
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
    layout: CacheLayout = field(metadata=STATIC)
    own: int = field(default=1, metadata=STATIC)
    stage: Stage = field(default="empty", metadata=STATIC)
    mode: Mode = field(default="stream", metadata=STATIC)
    start: int = field(default=0, metadata=STATIC)
    keeps: bool = field(default=True, metadata=STATIC)
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
            frames: for a stream without a window, the most frames that can be made.
            positions: "absolute" (default): `rotary_emb` has the angles of the block, and keys are
                kept rotated. "slots": keys are kept unrotated, and `rotary_emb` has the angles of
                the window, whatever the frame. "slots_with_sink": the same, with a sink.
            context: what is split over the context axis, "heads" (default) or "tokens" of each
                frame. By heads, Q and the new K and V travel; by tokens, Q and the output.
            per_layer: False (default): one array of all layers, which a scan over layers carries.
                True: an array for each layer, which a GPU's kernels read without a copy.

        Raises:
            InputError: a size, dtype or name is none of those above.
            MeshError: a size does not divide over the mesh.
        """
        layers, batch, kv_heads, dim_head = checks.sizes(
            layers=layers, batch=batch, kv_heads=kv_heads, dim_head=dim_head
        )
        name, mesh = checks.dtype(dtype), usable_mesh(mesh)
        slots = checks.slots(stream, frames)
        layout = CacheLayout(stream, slots, positions, mesh_shape(mesh), context)
        layout.check_sizes(batch, kv_heads)
        of_layer = (batch, slots * stream.tokens_per_frame, kv_heads, dim_head)

        def zeros() -> Any:
            leading = [1] * layers if checks.per_layer(per_layer) else [layers]
            made = tuple(layout.zeros((n, *of_layer), name, ".BFK.", mesh) for n in leading)
            return made if per_layer else made[0]

        k, v, frame = zeros(), zeros(), layout.zeros((), "int32", "", mesh)
        return cls(k, v, frame, layout, stream.first_block)._begun()

    # ---- what attention takes --------------------------------------------------------------------

    def layer(self, index: int | Int[Array, ""]) -> CacheLayer:
        """Return a layer for `FlaxAttention(..., cache=)`.

        In a scan over layers whose carry is the cache, `index` is traced; with `per_layer=True` it
        is a number.
        """
        checks.layer(index, self.shape[0], self.is_per_layer)
        return CacheLayer(self, index)

    @property
    def is_per_layer(self) -> bool:
        """Whether each layer has arrays of its own."""
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
        """How many tokens the block that is being made has."""
        return self.own * self.layout.stream.tokens_per_frame

    @property
    def is_done(self) -> bool:
        """Whether the slots have no room for another block; never with a window."""
        return self.stage in ("done", "complete")

    @property
    def is_written(self) -> bool:
        """Whether passes write to it."""
        return self.keeps and self.mode != "cached"

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values on all devices together."""
        return 2 * math.prod(self.shape) * self.dtype.itemsize

    # ---- from block to block ---------------------------------------------------------------------

    def prefix(self, frames: int) -> Self:
        """Let the first pass take the clean frames of several blocks at once.

        Args:
            frames: how many; an image is one frame of a stream with `first_frame_alone`.

        Raises:
            InputError: frames are made already, or these are no whole blocks.
        """
        return replace(self, own=checks.prefix(self, frames))._begun(self)

    def unwritten(self) -> Self:
        """Let passes over the first block leave the cache as it is.

        The first block sees itself alone, so nothing reads the keys of its noisy passes, which are
        all but the last. A later block reads its own keys from the cache.

        Raises:
            InputError: frames are made already, or the pass extracts.
        """
        checks.unwritten(self)
        return replace(self, keeps=False)._begun(self)

    def advance(self) -> Self:
        """Go on to the next block, after the pass that wrote this block's clean keys and values.

        While the cache fills, the stage is found from `frame`, which is read from the device. Under
        `jit` it cannot be read: the stage stays "filling", which is right for every frame.

        Raises:
            InputError: passes only read this cache, none has written to it yet (a second `advance`
                would skip frames), or it has no slots for the block.
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
        """Mark that no pass has written to this cache, or to the cache `of` that it is made of."""
        object.__setattr__(self, "is_begun", of is None or of.is_begun)
        return self

    def _stage_at(self, least: int, most: int) -> Stage:
        """Return the stage of rows whose next block begins at frames from `least` to `most`."""
        size, slots = self.layout.stream.frames_per_block, self.layout.frames
        if self.layout.stream.window is None and most + size > slots:
            return "complete" if least == slots else "done"
        return "full" if least + size >= slots else "filling"

    @classmethod
    def stacked(cls, caches: Sequence[KVCache]) -> KVCache:
        """Join caches of one layout along the batch; each row goes on from its own frame.

        Raises:
            InputError: they differ in layout or layers, or the first block of one is not done.
        """
        checks.stacked(caches)
        k, v = jax.tree.map(lambda *x: jnp.concatenate(x, 1), *((c.k, c.v) for c in caches))
        rows = [jnp.broadcast_to(c.frame, (c.shape[1],)) for c in caches]
        both = replace(caches[0], k=k, v=v, frame=jnp.concatenate(rows))
        if is_tracer(both.frame):
            stages = {c.stage for c in caches}
            return replace(both, stage=stages.pop() if len(stages) == 1 else "filling")
        return replace(both, stage=both._stage_at(*_ends(both.frame)))

    # ---- the same frames, cached anew ------------------------------------------------------------

    def refill(self) -> Self:
        """Begin to cache the kept frames anew, in the memory of this cache, for another prompt.

        They are `stream.kept(frame)`. Run them block by block like the first frames of a video, but
        with their own numbers as positions, and call `refilled`. Once the window has dropped
        frames, all blocks have `frames_per_block`.

        Raises:
            InputError: the cache is empty, or only read.
        """
        checks.refill(self)
        layout = self.layout
        if int(self.frame) > layout.frames:
            # The kept frames begin within a block, so blocks are counted from their end.
            layout = replace(layout, stream=replace(layout.stream, first_frame_alone=False))
        frame, own = jnp.zeros_like(self.frame), layout.stream.first_block
        return replace(self, frame=frame, layout=layout, own=own, stage="empty")._begun()

    def refilled(self, stream: Stream, frame: int) -> Self:
        """Take the frames that were cached anew as the last ones of `stream` before `frame`.

        If the window has dropped frames, slots are moved so that each frame is in its own; no other
        function copies a cache.

        Raises:
            InputError: not all kept frames are cached anew.
        """
        checks.refilled(self, stream, frame)
        layout = replace(self.layout, stream=stream)
        k, v = self.k, self.v
        if behind := frame - len(stream.kept(frame)):
            k, v = jax.tree.map(lambda x: layout.turned(x, behind), (k, v))
        at = jnp.full_like(self.frame, frame)
        return replace(self, k=k, v=v, layout=layout, frame=at)._begun()

    # ---- tokens that never change ----------------------------------------------------------------

    def extract(self, start: int = 0) -> Self:
        """Let the next pass attend as without a cache, and keep the keys and values of some tokens.

        They are as many tokens as the first block, or `prefix(frames)`, has: reference images, a
        prompt's prefix. Mask and bias may be given.

        Args:
            start: the first of these tokens in the sequence; default 0.

        Raises:
            InputError: the cache has frames already.
        """
        return replace(self, mode="extract", start=checks.extract(self, start))._begun(self)

    def cached(self) -> Self:
        """Let passes only read: queries see the kept tokens and their own.

        Raises:
            InputError: the cache is empty, or keys are kept without their rotary embedding.
        """
        checks.cached(self)
        slots = self.layout.frames
        known = self.stage != "complete" and not is_tracer(self.frame)
        full = self.stage == "complete" or (known and _ends(self.frame)[0] >= slots)
        return replace(self, mode="cached", stage="full" if full else "filling")

    def append(self, other: KVCache) -> KVCache:
        """Return a cache, for reading, with the tokens of this cache and then those of another.

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
        # jax maps over caches, with shardings, axes or None in place of arrays.
        first = self.k[0] if self.is_per_layer else self.k
        shape, dtype = "?", type(first).__name__
        if hasattr(first, "shape"):
            shape, dtype = ",".join(map(str, self.shape)), self.dtype
        mode = "" if self.mode == "stream" else f", {self.mode}"
        mode += "" if self.keeps else ", unwritten"
        of = f"frame {frame}, {self.layout.frames} slots, {self.stage}{mode}"
        return f"KVCache({dtype}[{shape}], {of})"


class CacheLayer(NamedTuple):
    """One layer of a cache of all layers; the index may be traced."""

    cache: KVCache
    index: Any

    @property
    def arrays(self) -> tuple[Array, Array, Int[Array, ""]]:
        """The arrays of keys and values with the layer, [L, B, S, K, H], and its index in them."""
        k, v = self.cache.k, self.cache.v
        if self.cache.is_per_layer:
            return k[self.index], v[self.index], jnp.zeros((), jnp.int32)
        return k, v, jnp.asarray(self.index, jnp.int32)

    def changed(self, k: Array, v: Array) -> KVCache:
        """Return the cache with new values of the first two `arrays`."""
        cache, i = self
        if not cache.is_per_layer:
            return replace(cache, k=k, v=v)
        both = [(*old[:i], new, *old[i + 1 :]) for old, new in ((cache.k, k), (cache.v, v))]
        return replace(cache, k=both[0], v=both[1])


def _ends(frame: Array) -> tuple[int, int]:
    """Return the least and the largest frame of the batch's rows, read from the device."""
    numbers = jax.device_get(frame)
    return int(numbers.min()), int(numbers.max())
