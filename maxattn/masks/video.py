"""Masks of video diffusion: a query sees blocks of frames, within a budget of frames."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from maxattn.errors import InputError
from maxattn.masks.base import Lengths, Mask
from maxattn.masks.positions import PositionMask
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.spans import BIG, MOST_SPANS, Span
from maxattn.masks.tree import MOST, mask_type, whole


@dataclass(frozen=True, eq=False, repr=False)
class FrameMask(PositionMask):
    """The fields of `VideoMask` and `TeacherForcing`: frames of tokens in blocks of frames."""

    frames: int
    tokens_per_frame: int
    frames_per_block: int = 1
    window: int | None = None
    sink: int = 0
    first_frame_alone: bool = False

    def __post_init__(self) -> None:
        whole(self, "frames", least=1)
        check_blocks(self)
        whole(self, "offset", least=-MOST, optional=True)
        if self.frames * self.tokens_per_frame > self.most_tokens:
            rule = f"frames * tokens_per_frame must be at most {self.most_tokens}"
            where, remedy = f"{type(self).__name__}.frames", "give fewer frames"
            raise InputError(where, self.frames, rule, remedy)

    @property
    def most_tokens(self) -> int:
        return BIG

    @property
    def budget(self) -> int | None:
        """The most frames that a query may see; None without a window."""
        return None if self.window is None else self.window * self.frames_per_block

    @property
    def sees_all_past(self) -> bool:
        """Whether the budget covers all frames; if so, `seen` ignores it: it may exceed int32."""
        return self.budget is None or self.budget >= self.frames

    def end_of_block(self, frame: Any, xp: Any) -> Any:
        """Return the first frame after the block that `frame` is in."""
        alone, size = int(self.first_frame_alone), self.frames_per_block
        end = alone + ((frame - alone) // size + 1) * size
        # A frame before the first block, such as a first frame alone, is a block by itself.
        return xp.minimum(xp.where(frame < alone, frame + 1, end), self.frames)

    def start_of_block(self, frame: Any, xp: Any) -> Any:
        """Return the first frame of the block that `frame` is in."""
        alone, size = int(self.first_frame_alone), self.frames_per_block
        return xp.where(frame < alone, frame, alone + (frame - alone) // size * size)

    def start_of_window(self, end: Any, xp: Any) -> Any:
        """Return the first frame of the window of the block that ends before frame `end`."""
        budget = self.budget or 0
        return xp.where(end <= budget, 0, end - (budget - self.sink))

    def first_over_budget(self) -> int:
        """Return the first frame whose block ends beyond the budget."""
        alone, size = int(self.first_frame_alone), self.frames_per_block
        return alone + ((self.budget or 0) - alone) // size * size

    def most_keys(self) -> int | None:
        return None if self.budget is None else self.budget * self.tokens_per_frame


def check_blocks(value: Any) -> None:
    """Check the blocks, window and sink of a mask, or of another dataclass with these fields."""
    for name in ("tokens_per_frame", "frames_per_block"):
        whole(value, name, least=1)
    whole(value, "window", least=1, optional=True)
    whole(value, "sink", least=0)
    alone = value.first_frame_alone
    if not isinstance(alone, bool | np.bool_):
        where = f"{type(value).__name__}.first_frame_alone"
        raise InputError(where, repr(alone), "it must be True or False", "give a Python bool")
    object.__setattr__(value, "first_frame_alone", bool(alone))
    if value.window is None:
        return
    budget = value.window * value.frames_per_block
    most = budget - value.frames_per_block
    if value.sink > most:
        fits = f"the budget of {budget} frames (window * frames_per_block)"
        rule = f"sink plus a query's own block must fit {fits}"
        remedy = f"give sink of at most {most}, or a larger window"
        raise InputError(f"{type(value).__name__}.sink", value.sink, rule, remedy)


@mask_type
class VideoMask(FrameMask):
    """Allow a query the frames up to the end of its own block of frames, within a budget of frames.

    Let `end` be the first frame after the query's block, and `budget = window * frames_per_block`.
    If `end <= budget`, the query sees frames `[0, end)`; else frames `[0, sink)` and
    `[end - (budget - sink), end)`. So no query sees more than `budget` frames.

    Args:
        frames: number of frames in the video; the keys are `frames * tokens_per_frame` tokens. The
            last block may be shorter.
        tokens_per_frame: number of tokens in a frame.
        frames_per_block: number of frames that are generated together and see each other.
        window: number of blocks in the budget, including the query's block; None for no limit.
        sink: number of first frames that every query keeps seeing; they count in the budget.
        first_frame_alone: whether frame 0 is a separate block before all other blocks.
        offset: position of query 0 in tokens; None puts the last query at the last key.

    Raises:
        InputError: a number is out of range, or `sink` leaves no room in the budget for a query's
            own block.

    >>> from maxattn import masks
    >>> print(masks.VideoMask(6, 1, window=3, sink=1).show(6, 6))
    VideoMask(6, 1, window=3, sink=1, offset=0)
    6 queries down, 6 keys across
    █ · · · · ·
    █ █ · · · ·
    █ █ █ · · ·
    █ · █ █ · ·
    █ · · █ █ ·
    █ · · · █ █
    """

    offset: int | None = None

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        tokens = self.tokens_per_frame
        end = self.end_of_block(pos // tokens, xp)
        if self.sees_all_past:
            return ((None, end * tokens),)
        recent = (self.start_of_window(end, xp) * tokens, end * tokens)
        return (recent, (None, xp.minimum(end, self.sink) * tokens)) if self.sink else (recent,)

    def bound_to(self, lengths: Lengths) -> Mask:
        tokens = self.frames * self.tokens_per_frame
        if lengths.kv_len != tokens:
            product = f"{self.frames} * {self.tokens_per_frame} = {tokens} tokens"
            rule = f"the number of keys must be frames * tokens_per_frame = {product}"
            remedy = f"set frames to the number of frames in the keys, or pass {tokens} keys"
            raise InputError("mask", f"{self} with kv_len={lengths.kv_len}", rule, remedy)
        return super().bound_to(lengths)

    def own_block(self) -> tuple[int, int] | None:
        block = self.frames_per_block * self.tokens_per_frame
        is_alone = (self.window, self.first_frame_alone, self.offset) == (1, False, 0)
        return (block, block) if is_alone else None

    def own_period(self) -> int | None:
        return self.tokens_per_frame * (1 if self.first_frame_alone else self.frames_per_block)

    def row_blocks(self) -> tuple[RowBlocks, ...] | None:
        alone, offset, tokens = int(self.first_frame_alone), self.offset or 0, self.tokens_per_frame
        if alone and offset < 0:  # frames before frame 0 are in blocks of another size
            return None
        size = self.frames_per_block * tokens
        turns = tuple(frame * tokens - offset for frame in (alone, self.first_over_budget()))
        return (RowBlocks(size, offset - alone * tokens, turns),)


@mask_type
class TeacherForcing(FrameMask):
    """Allow each noisy block of frames to see itself and the clean frames before it.

    The sequence is `[clean | noisy]`, each half with the tokens of all frames. A clean query sees
    the clean half as under `VideoMask`. A noisy query sees its block of the noisy half and, within
    the same budget, the frames of the clean half that come before this block.

    Args:
        frames: number of frames in the video; the keys are `2 * frames * tokens_per_frame` tokens.
            The queries are the same tokens, or those of the noisy half alone.
        tokens_per_frame, frames_per_block, window, sink, first_frame_alone: as in `VideoMask`.
        shards: number of equal parts that each half is cut into, default 1. The sequence is clean
            part 0, noisy part 0, clean part 1, and so on. With one shard per device in context
            parallelism, all devices have equally many noisy tokens.
        offset: position of query 0 in tokens; None puts the last query at the last key.

    Raises:
        InputError: a number is out of range, `sink` leaves no room for a query's own block, or a
            shard is not made of whole blocks.

    >>> from maxattn import masks
    >>> print(masks.TeacherForcing(4, 1, window=3, sink=1).show(8, 8))
    TeacherForcing(4, 1, window=3, sink=1, offset=0)
    8 queries down, 8 keys across
    █ · · · · · · ·
    █ █ · · · · · ·
    █ █ █ · · · · ·
    █ · █ █ · · · ·
    · · · · █ · · ·
    █ · · · · █ · ·
    █ █ · · · · █ ·
    █ · █ · · · · █
    """

    shards: int = 1
    offset: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "shards", least=1)
        if self.shards == 1:
            return
        if self.first_frame_alone or self.frames % (self.shards * self.frames_per_block):
            blocks = f"frames={self.frames} in blocks of {self.frames_per_block}"
            alone = ", the first frame alone" if self.first_frame_alone else ""
            rule = f"each shard must have equally many whole blocks; given are {blocks}{alone}"
            remedy = "give frames = shards * blocks * frames_per_block, or shards=1"
            raise InputError("TeacherForcing.shards", self.shards, rule, remedy)
        most = MOST_SPANS // 2 - 1
        if self.shards > most:
            rule = f"a query sees at most {MOST_SPANS} intervals of keys: at most {most} shards fit"
            remedy = "shard the context over fewer devices"
            raise InputError("TeacherForcing.shards", self.shards, rule, remedy)

    @property
    def most_tokens(self) -> int:
        return BIG // 2

    @property
    def half(self) -> int:
        """The number of tokens in a shard's clean half."""
        return self.frames * self.tokens_per_frame // self.shards

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        tokens, half = self.tokens_per_frame, self.half
        first = pos // (2 * half) * half  # the first token of the video in the query's shard
        noisy = pos - 2 * first >= half
        frame = (pos - first - xp.where(noisy, half, 0)) // tokens
        start, end = self.start_of_block(frame, xp), self.end_of_block(frame, xp)
        own = start * tokens + first + half
        own_end = xp.where(noisy, own + (end - start) * tokens, own)
        return (*self._clean(xp.where(noisy, start, end), end, xp), (own, own_end))

    def _clean(self, stop: Any, end: Any, xp: Any) -> tuple[Span, ...]:
        tokens = self.tokens_per_frame
        if self.sees_all_past:
            return self._dealt((end * 0, stop * tokens), self.shards, xp)
        recent = (self.start_of_window(end, xp) * tokens, stop * tokens)
        sink = (end * 0, xp.minimum(stop, self.sink) * tokens)
        of_sink = -(-self.sink * tokens // self.half)  # shards that contain a part of the sink
        return self._dealt(recent, self.shards, xp) + self._dealt(sink, of_sink, xp)

    def _dealt(self, clean: Span, shards: int, xp: Any) -> tuple[Span, ...]:
        """Return the positions, in the first `shards` shards, of an interval of the clean video."""
        if self.shards == 1:
            return (clean,) * shards
        (lo, hi), half = clean, self.half
        firsts = [i * half for i in range(shards)]
        return tuple((xp.maximum(lo, f) + f, xp.minimum(hi, f + half) + f) for f in firsts)

    def bound_to(self, lengths: Lengths) -> Mask:
        tokens = 2 * self.frames * self.tokens_per_frame
        bound = super().bound_to(lengths) if lengths.kv_len == tokens else None
        if bound is not None and 0 <= bound.offset <= tokens - lengths.q_len:  # pyright: ignore[reportAttributeAccessIssue]
            return bound
        of = f"2 * frames * tokens_per_frame = 2 * {self.frames} * {self.tokens_per_frame}"
        rule = f"the keys must be the clean and the noisy video, {of} = {tokens} tokens, and the"
        rule += " queries must be among these tokens"
        found = f"{self} with q_len={lengths.q_len}, kv_len={lengths.kv_len}"
        raise InputError("mask", found, rule, "join both: Stream.pair(clean, noisy)")

    def own_period(self) -> int | None:
        whole_blocks = not self.first_frame_alone and self.frames % self.frames_per_block == 0
        return self.tokens_per_frame * (self.frames_per_block if whole_blocks else 1)

    def row_blocks(self) -> tuple[RowBlocks, ...] | None:
        offset = self.offset or 0
        if offset < 0:  # query rows before row 0 are in blocks of another size
            return None
        tokens, alone, half = self.tokens_per_frame, int(self.first_frame_alone), self.half
        size = self.frames_per_block * tokens
        # the query rows at which a half begins, and those of the tokens `inner` in each half
        begins = range(0, 2 * self.shards * half + 1, half)
        inner = (0, alone * tokens, self.first_over_budget() * tokens)
        rows = {b + i - b // (2 * half) * half for b in begins for i in inner} | set(begins)
        turns = tuple(row - offset for row in sorted(rows))
        phases = {-alone * tokens % size, -(half + alone * tokens) % size}
        return tuple(RowBlocks(size, offset + phase, turns) for phase in sorted(phases))
