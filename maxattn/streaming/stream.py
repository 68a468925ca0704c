"""`Stream`: how a video is made block by block. Its masks and its cache derive from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from maxattn.config.numbers import whole
from maxattn.errors import InputError
from maxattn.masks import TeacherForcing, VideoMask
from maxattn.masks.video import check_blocks
from maxattn.streaming import checks

if TYPE_CHECKING:
    from jaxtyping import Array, Int, Shaped

    from maxattn.streaming.kv_cache import KVCache


@dataclass(frozen=True)
class Stream:
    """A video that is made block by block, and which earlier frames each block sees.

    With `budget = window * frames_per_block`, a block that ends before frame `end` sees all earlier
    frames while `end <= budget`. Later it sees the first `sink` frames and the last `budget - sink`
    before `end`, its own frames included. Training masks and the sampling cache agree, since both
    are made from this value.

    Args:
        tokens_per_frame: tokens in a (latent) frame.
        frames_per_block: frames that are made together and see each other; default 1. A model is
            trained for one value.
        window: number of blocks that a block sees, itself included; default None for all.
        sink: how many of the first frames stay visible, inside the window; default 0.
        first_frame_alone: whether frame 0 is a block by itself, before the blocks of
            `frames_per_block`; default False.

    Raises:
        InputError: a number is out of range, `sink` leaves no room for a block, or `sink` is given
            without a window.

    >>> stream = ma.Stream(tokens_per_frame=1, frames_per_block=1, window=3, sink=1)
    >>> [stream.slots(frame) for frame in range(7)]  # frame 0 stays; two slots are used in turn
    [0, 1, 2, 1, 2, 1, 2]
    >>> print(stream.mask(frames=5).show(5, 5))
    VideoMask(5, 1, window=3, sink=1, offset=0)
    5 queries down, 5 keys across
    █ · · · ·
    █ █ · · ·
    █ █ █ · ·
    █ · █ █ ·
    █ · · █ █
    """

    tokens_per_frame: int
    frames_per_block: int = 1
    window: int | None = None
    sink: int = 0
    first_frame_alone: bool = False

    def __post_init__(self) -> None:
        check_blocks(self)
        if self.sink and self.window is None:
            rule = "a sink is part of the window, and without a window every frame stays"
            raise InputError("Stream.sink", self.sink, rule, "give a window, or leave sink out")

    # ---- blocks ----------------------------------------------------------------------------------

    @property
    def budget(self) -> int | None:
        """The most frames that a block sees, its own included; None without a window."""
        return None if self.window is None else self.window * self.frames_per_block

    @property
    def first_block(self) -> int:
        """Number of frames of the first block."""
        return 1 if self.first_frame_alone else self.frames_per_block

    def ends_block(self, frames: int) -> bool:
        """Return whether the first `frames` frames are whole blocks."""
        alone = int(self.first_frame_alone)
        return frames >= self.first_block and (frames - alone) % self.frames_per_block == 0

    def blocks(self, frames: int) -> tuple[tuple[int, int], ...]:
        """List (first frame, frame after the last) of each block of a video.

        Args:
            frames: number of frames of the video.

        Raises:
            InputError: the last block is not whole.

        >>> ma.Stream(1560, frames_per_block=3, first_frame_alone=True).blocks(7)
        ((0, 1), (1, 4), (4, 7))
        """
        frames = self.check_frames("frames", frames)
        starts = [*range(self.first_block, frames, self.frames_per_block)]
        return tuple(zip((0, *starts), (*starts, frames), strict=True))

    def check_frames(self, name: str, frames: Any) -> int:
        """Return a number of frames as an int; refuse one that does not fill whole blocks."""
        if (count := whole(frames)) is not None and self.ends_block(count):
            return count
        size = self.frames_per_block
        first = " after the first frame" if self.first_frame_alone else ""
        near = [n for n in range(1, 4 * size + 2) if self.ends_block(n)][:3]
        rule = f"frames must fill whole blocks of {size}{first}"
        remedy = f"give {', '.join(map(str, near))}, ..."
        raise InputError(name, repr(frames), rule, remedy)

    # ---- masks -----------------------------------------------------------------------------------

    def mask(self, frames: int) -> VideoMask:
        """Make the mask of diffusion forcing, in which each frame has its own noise level.

        Args:
            frames: number of frames of the clip.

        Raises:
            InputError: `frames` does not fill whole blocks, or is too large.
        """
        return VideoMask(self.check_frames("frames", frames), *self._of_blocks())

    def teacher_mask(self, frames: int, shards: int = 1) -> TeacherForcing:
        """Make the mask of teacher forcing, over a clean clip and the same clip with noise.

        Args:
            frames: number of frames of the clip; queries and keys are `2 * frames *
                tokens_per_frame`, in the order of `pair`.
            shards: number of devices of the context axis, each of which gets a part of both clips;
                default 1, one clip after the other.

        Raises:
            InputError: the clip, or a shard of it, is not whole blocks, or has too many frames.
        """
        frames = self.check_frames("frames", frames)
        return TeacherForcing(frames, *self._of_blocks(), shards=shards)

    def _of_blocks(self) -> tuple[Any, ...]:
        sizes = self.tokens_per_frame, self.frames_per_block, self.window
        return *sizes, self.sink, self.first_frame_alone

    def pair(
        self,
        clean: Shaped[Array, "..."],
        noisy: Shaped[Array, "..."],
        shards: int = 1,
        axis: int = 1,
    ) -> Array:
        """Join a clean and a noisy clip in the order of `teacher_mask`.

        Args:
            clean, noisy: tokens, rotary angles or frame times, as arrays of the same shape.
            shards: as for `teacher_mask`.
            axis: the axis of tokens or frames, which is twice as long in the result; default 1.

        Raises:
            InputError: the clips are not arrays of one shape, or `shards` does not divide `axis`.

        >>> stream = ma.Stream(tokens_per_frame=1)
        >>> stream.pair(jnp.array([1, 2, 3, 4]), jnp.array([5, 6, 7, 8]), shards=2, axis=0)
        Array([1, 2, 5, 6, 3, 4, 7, 8], dtype=int32)
        """
        size = checks.clip_size("clean", clean, axis)
        checks.clip_size("noisy", noisy, axis)
        if tuple(clean.shape) != tuple(noisy.shape):
            rule = f"clean and noisy must have the same shape, and clean has {clean.shape}"
            raise InputError("noisy", f"shape {tuple(noisy.shape)}", rule, "add noise to clean")
        checks.shards(shards, size, "a clip")
        parts = zip(*(jnp.split(x, shards, axis) for x in (clean, noisy)), strict=True)
        return jnp.concatenate([x for both in parts for x in both], axis)

    def unpair(
        self, both: Shaped[Array, "..."], shards: int = 1, axis: int = 1
    ) -> tuple[Array, Array]:
        """Split the result of `pair`, with the same `shards` and `axis`, into (clean, noisy).

        Raises:
            InputError: `both` is not an array, or `2 * shards` does not divide its axis.
        """
        size = checks.clip_size("both", both, axis)
        if size % 2:
            rule = f"clean and noisy have the same length, so axis {axis} must be even, not {size}"
            remedy = "give the result of stream.pair, or attention's output for it"
            raise InputError("both", f"shape {tuple(both.shape)}", rule, remedy)
        checks.shards(shards, size // 2, "each clip")
        parts = jnp.split(both, 2 * shards, axis)
        return jnp.concatenate(parts[::2], axis), jnp.concatenate(parts[1::2], axis)

    # ---- cache -----------------------------------------------------------------------------------

    def slots(self, frame: int | Int[Array, "..."] | Int[np.ndarray, "..."]) -> Any:
        """Return the slot of the cache that a frame is written to.

        Until the window is full, and always without a window, the slot is the frame's number. Later
        it is the slot of the oldest frame after the sink.

        Args:
            frame: a number from 0, or an array of them; may be traced.

        Raises:
            InputError: a frame is not a whole number, or is below 0. Under `jit` a number below 0
                cannot be refused, and has no slot: the result is below 0, or another frame's.
        """
        return self.slot_of(checks.frames_from_zero(frame))

    def slot_of(self, frame: Any) -> Any:
        """Return the slot of a frame as `slots` does, without a look at the frame's value."""
        if self.budget is None:
            return frame
        ring = self.budget - self.sink
        turn = self.sink + (frame - self.sink) % ring
        if isinstance(frame, int):
            return frame if frame < self.sink else turn
        xp = jnp if isinstance(frame, jax.Array) else np
        return xp.where(frame < self.sink, frame, turn)

    def kept(self, end: int) -> tuple[int, ...]:
        """List the frames that a cache keeps after frame `end - 1` is made, oldest first.

        Raises:
            InputError: `end` is not an integer of at least 0.

        >>> ma.Stream(tokens_per_frame=1, window=3, sink=1).kept(7)
        (0, 5, 6)
        """
        end = checks.from_zero("end", end, "a number of frames")
        if self.budget is None or end <= self.budget:
            return tuple(range(end))
        return (*range(self.sink), *range(end - self.budget + self.sink, end))

    def cache(self, **sizes: Any) -> KVCache:
        """Make an empty cache, as `KVCache.empty(self, ...)`."""
        from maxattn.streaming.kv_cache import KVCache

        return KVCache.empty(self, **sizes)
