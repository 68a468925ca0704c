"""`KVCache`: keys and values of the frames that are made, as a value that is passed along."""

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
    """Hold keys and values of the frames that a block sees, for all layers.

    A frozen pytree: attention takes a layer of it and returns the whole, changed. Under `jax.jit`
    with `donate_argnums` the change is made in place. Each frame has a slot; a new frame takes the
    slot of the oldest one that is no sink. What depends on `frame` is computed on the device, so
    that one program serves every block; `stage` chooses among three programs.

    Args:
        k, v: keys and values [L, B, S, K, H]: L layers, S the tokens of all slots. Or a tuple of
            them, [1, B, S, K, H] for each layer, for layers that are not scanned.
        frame: the first frame of the block that is being made: a number, or one a batch row, [B].
        layout: the stream, the slots, and how they lie over a mesh.
        own: frames of the block that is being made.
        stage: "empty" before the first block is done; "filling"; "full" once a block and those
            before it fill every slot. Without a window "complete" where every slot holds a frame,
            and "done" where those that are left are too few for a block.
        mode: "stream", or what `extract` and `cached` set.
        start: the first token that `extract` keeps.
        keeps: False where `unwritten` set it.

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
        """Make a cache that holds nothing.

        Args:
            stream: blocks, window and sink.
            layers, batch, kv_heads, dim_head: L, B, K and H.
            dtype: of keys and values, that of the module's projections; default bfloat16.
            mesh: that of the modules: batch over data and fsdp, heads over tensor; default the
                surrounding one, if there is one.
            frames: slots of a stream without a window, the most frames that can be made.
            positions: "absolute" (default): keys are kept as `rotary_emb` of their block turned
                them. "slots": keys are kept unturned, and `rotary_emb` is a table of the window,
                whatever the frame; "slots_with_sink" where the stream has a sink.
            context: what the context axis shares, "heads" (default) or "tokens" of each frame.
                Heads travel with Q and the new K and V; of tokens, Q and the output travel.
            per_layer: False (default): one array of all layers, which a scan over layers carries.
                True: arrays of each layer, which a GPU's kernels read where they lie.

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
            if checks.per_layer(per_layer):
                return tuple(
                    layout.zeros((1, *of_layer), name, ".BFK.", mesh) for _ in range(layers)
                )
            return layout.zeros((layers, *of_layer), name, ".BFK.", mesh)

        k, v, frame = zeros(), zeros(), layout.zeros((), "int32", "", mesh)
        return cls(k, v, frame, layout, stream.first_block)._begun()

    # ---- what attention takes --------------------------------------------------------------------

    def layer(self, index: int | Int[Array, ""]) -> CacheLayer:
        """Name a layer, as `FlaxAttention(..., cache=)` takes it.

        Args:
            index: of the layer; traced in a scan over layers whose carry is the cache. Of a cache
                with arrays of each layer it is a number.
        """
        checks.layer(index, self.shape[0], self.is_per_layer)
        return CacheLayer(self, index)

    @property
    def is_per_layer(self) -> bool:
        """Whether each layer has arrays of its own."""
        return isinstance(self.k, tuple)

    @property
    def shape(self) -> tuple[int, ...]:
        """[L, B, S, K, H], of the keys of all layers."""
        if not isinstance(self.k, tuple):
            return tuple(self.k.shape)
        return (len(self.k), *self.k[0].shape[1:])

    @property
    def dtype(self) -> Any:
        """Of keys and values."""
        return self.k[0].dtype if isinstance(self.k, tuple) else self.k.dtype

    @property
    def tokens(self) -> int:
        """Tokens of the block that is being made."""
        return self.own * self.layout.stream.tokens_per_frame

    @property
    def is_done(self) -> bool:
        """Whether there is no window, and no room for another block."""
        return self.stage in ("done", "complete")

    @property
    def is_written(self) -> bool:
        """Whether a pass writes to it."""
        return self.keeps and self.mode != "cached"

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, of all devices together."""
        return 2 * math.prod(self.shape) * self.dtype.itemsize

    # ---- from block to block ---------------------------------------------------------------------

    def prefix(self, frames: int) -> Self:
        """Let the first pass take the clean frames of several blocks at once.

        Args:
            frames: whole blocks; an image is one frame of a stream with `first_frame_alone`.

        Raises:
            InputError: frames are made already, or these are no whole blocks.
        """
        return replace(self, own=checks.prefix(self, frames))._begun(self)

    def unwritten(self) -> Self:
        """Let passes over the first block leave the cache as it is: all of them but the last.

        The first block sees itself alone, and what a noisy pass writes no one reads. A later block
        reads its own keys from the cache.

        Raises:
            InputError: frames are made already, or the pass extracts.
        """
        checks.unwritten(self)
        return replace(self, keeps=False)._begun(self)

    def advance(self) -> Self:
        """Go on to the next block, after the pass that wrote this one's clean keys and values.

        It counts frames. What `advance`, `empty` and `refill` return no pass has written to, and a
        second `advance` of it would skip frames. While the cache fills it reads `frame` from the
        device, to know the stage. Under `jit` it cannot: a cache that fills keeps the stage
        "filling", which is right for every frame.

        Raises:
            InputError: the cache is read alone, no pass has written to it, or it has no slots for
                the block.
        """
        checks.advance(self)
        frame, size = self.frame + self.own, self.layout.stream.frames_per_block
        stage = self._next_stage(frame)
        after = replace(self, frame=frame, own=size, stage=stage, mode="stream", start=0)
        return after._begun()

    def _begun(self, of: KVCache | None = None) -> Self:
        """Mark that no pass has written to this cache; what a pass or a program returns is not.

        Args:
            of: the cache that it is made of, which says whether; default none has.
        """
        object.__setattr__(self, "is_begun", of is None or of.is_begun)
        return self

    def _next_stage(self, frame: Any) -> Stage:
        if self.stage == "empty":
            return self._stage_at(self.own, self.own)
        if self.stage == "full" and self.layout.stream.window is not None:
            return "full"
        return self.stage if is_tracer(frame) else self._stage_at(*_ends(frame))

    def _stage_at(self, least: int, most: int) -> Stage:
        """Tell the stage of rows whose next block begins at frames from `least` to `most`."""
        size, slots = self.layout.stream.frames_per_block, self.layout.frames
        if self.layout.stream.window is None and most + size > slots:
            return "complete" if least == slots else "done"
        return "full" if least + size >= slots else "filling"

    @classmethod
    def stacked(cls, caches: Sequence[KVCache]) -> KVCache:
        """Join caches along the batch; each row goes on from its own frame.

        Args:
            caches: of one layout and one number of layers, each after its first block.

        Raises:
            InputError: they differ, or one is empty.
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
        """Begin to cache the kept frames anew, in the memory of this cache: for another prompt.

        They are `stream.kept(frame)`. Run them block by block, as if they were the first of a
        video, with their own numbers as positions; then `refilled`. Once frames were given up, all
        blocks have `frames_per_block`.

        Raises:
            InputError: nothing is kept, or it is no stream's.
        """
        checks.refill(self)
        layout = self.layout
        if int(self.frame) > layout.frames:
            # What is kept begins within a block, so the grid is counted from its end.
            layout = replace(layout, stream=replace(layout.stream, first_frame_alone=False))
        frame, own = jnp.zeros_like(self.frame), layout.stream.first_block
        return replace(self, frame=frame, layout=layout, own=own, stage="empty")._begun()

    def refilled(self, stream: Stream, frame: int) -> Self:
        """Take the frames that were cached anew as the last ones before `frame`.

        Where frames were given up, all slots are turned so that each frame lies in its own: it is
        the one copy of a cache that is ever made.

        Args:
            stream: that the cache was made of.
            frame: the number of the next frame, as it was before `refill`.

        Raises:
            InputError: not all of the kept frames are cached.
        """
        checks.refilled(self, stream, frame)
        layout = replace(self.layout, stream=stream)
        k, v = self.k, self.v
        if behind := frame - len(stream.kept(frame)):
            k, v = jax.tree.map(lambda x: layout.turned(x, behind), (k, v))
        at = jnp.full_like(self.frame, frame)
        return replace(self, k=k, v=v, layout=layout, frame=at)._begun()

    # ---- what never changes ----------------------------------------------------------------------

    def extract(self, start: int = 0) -> Self:
        """Let the next pass attend as without a cache, and keep the keys and values of some tokens.

        The tokens are those of the first block, or of `prefix(frames)`: reference images, a
        prompt's prefix. Mask and bias may be given.

        Args:
            start: the first of them in the sequence.

        Raises:
            InputError: the cache holds frames already.
        """
        return replace(self, mode="extract", start=checks.extract(self, start))._begun(self)

    def cached(self) -> Self:
        """Let passes read and not write: queries see what is kept, and their own tokens.

        Raises:
            InputError: nothing is kept, or keys are kept without their rotary embedding.
        """
        checks.cached(self)
        slots = self.layout.frames
        known = self.stage != "complete" and not is_tracer(self.frame)
        full = self.stage == "complete" or (known and _ends(self.frame)[0] >= slots)
        return replace(self, mode="cached", stage="full" if full else "filling")

    def append(self, other: KVCache) -> KVCache:
        """Put what another cache keeps after what this one keeps, for reading.

        Args:
            other: of the same layout but for the number of slots, all of them filled as here.

        Raises:
            InputError: the layouts differ, or slots are empty.
        """
        checks.append(self, other)
        slots = self.layout.frames + other.layout.frames
        k, v = jax.tree.map(self.layout.joined, (self.k, self.v), (other.k, other.v))
        layout = replace(self.layout, frames=slots)
        return replace(self, k=k, v=v, frame=self.frame + other.frame, layout=layout)

    def __repr__(self) -> str:
        """Write shape, frame and stage, and no numbers."""
        known = isinstance(self.frame, jax.Array) and not is_tracer(self.frame)
        frame = self.frame.tolist() if known and not self.frame.is_deleted() else "unknown"
        # jax maps over caches, and puts shardings, axes or None in place of arrays.
        first = self.k[0] if self.is_per_layer else self.k
        has_arrays = hasattr(first, "shape")
        shape = ",".join(map(str, self.shape)) if has_arrays else "?"
        dtype = self.dtype if has_arrays else type(first).__name__
        mode = "" if self.mode == "stream" else f", {self.mode}"
        mode += "" if self.keeps else ", unwritten"
        of = f"frame {frame}, {self.layout.frames} slots, {self.stage}{mode}"
        return f"KVCache({dtype}[{shape}], {of})"


class CacheLayer(NamedTuple):
    """Name a layer of a cache.

    Args:
        cache: of all layers.
        index: of the layer; may be traced.
    """

    cache: KVCache
    index: Any

    @property
    def arrays(self) -> tuple[Array, Array, Int[Array, ""]]:
        """The keys and values that hold the layer, [L, B, S, K, H], and its index in them."""
        k, v = self.cache.k, self.cache.v
        if isinstance(k, tuple) or isinstance(v, tuple):
            return k[self.index], v[self.index], jnp.zeros((), jnp.int32)
        return k, v, jnp.asarray(self.index, jnp.int32)

    def changed(self, k: Array, v: Array) -> KVCache:
        """Return the cache with what `arrays` gave, changed."""
        cache, i = self
        if not cache.is_per_layer:
            return replace(cache, k=k, v=v)
        both = [(*old[:i], new, *old[i + 1 :]) for old, new in ((cache.k, k), (cache.v, v))]
        return replace(cache, k=both[0], v=both[1])


def _ends(frame: Array) -> tuple[int, int]:
    """Read the least and the largest frame of the batch's rows."""
    numbers = jax.device_get(frame)
    return int(numbers.min()), int(numbers.max())
