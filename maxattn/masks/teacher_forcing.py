"""The mask of teacher forcing: a clean video and the same video noisy, in one sequence."""

from __future__ import annotations

from typing import Any

from maxattn.errors import InputError
from maxattn.masks.base import BIG, Lengths, Mask, Span
from maxattn.masks.frames import FrameMask
from maxattn.masks.position_mask import whole
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.spans import MOST_SPANS
from maxattn.masks.tree import mask_type


@mask_type
class TeacherForcing(FrameMask):
    """Allow noisy blocks of frames themselves and the clean frames before them.

    The sequence is `[clean | noisy]`, each half the tokens of all frames. A clean query sees what
    `VideoMask` lets it see of the clean half. A noisy query sees its own block of the noisy half
    and, of the clean half, the frames before its block that are within the same budget.

    Args:
        frames: frames in the video; the keys are `2 * frames * tokens_per_frame` tokens, and so
            are the queries, or those of the noisy half alone. The last block has those that are
            left.
        tokens_per_frame, frames_per_block, window, sink, first_frame_alone: as in `VideoMask`.
        shards: into how many equal parts both halves are dealt: part 0 of the clean half, part 0 of
            the noisy half, part 1 of the clean half, and so on. Under context parallelism of so
            many devices each then has as many noisy tokens as the others.
        offset: position of query 0 in tokens; None puts the last query at the last key.

    Raises:
        InputError: a number is out of range, `sink` leaves no room for a query's own block, or the
            shards are no whole blocks.

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

    frames: int
    tokens_per_frame: int
    frames_per_block: int = 1
    window: int | None = None
    sink: int = 0
    first_frame_alone: bool = False
    shards: int = 1
    offset: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers, and that shards hold whole blocks."""
        FrameMask.__post_init__(self)
        whole(self, "shards", least=1)
        if self.shards == 1:
            return
        if self.first_frame_alone or self.frames % (self.shards * self.frames_per_block):
            blocks = f"frames={self.frames} in blocks of {self.frames_per_block}"
            alone = ", the first frame alone" if self.first_frame_alone else ""
            rule = f"each shard holds as many whole blocks as the others, of {blocks}{alone}"
            remedy = "give frames = shards * blocks * frames_per_block, or shards=1"
            raise InputError("TeacherForcing.shards", self.shards, rule, remedy)
        most = MOST_SPANS // 2 - 1
        if self.shards > most:
            rule = f"a query's keys lie in few intervals, so there are at most {most} shards"
            remedy = "shard the context over fewer devices"
            raise InputError("TeacherForcing.shards", self.shards, rule, remedy)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a video, whose two halves int32 positions hold."""
        return BIG // 2

    @property
    def half(self) -> int:
        """The tokens of a shard's clean half."""
        return self.frames * self.tokens_per_frame // self.shards

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See the clean frames of the budget, and noisy ones of one's own block."""
        tokens, half = self.tokens_per_frame, self.half
        first = pos // (2 * half) * half  # token of the video that the query's shard begins with
        noisy = pos - 2 * first >= half
        frame = (pos - first - xp.where(noisy, half, 0)) // tokens
        start, end = self.start_of_block(frame, xp), self.end_of_block(frame, xp)
        own = start * tokens + first + half
        own_end = xp.where(noisy, own + (end - start) * tokens, own)
        return (*self._clean(xp.where(noisy, start, end), end, xp), (own, own_end))

    def _clean(self, stop: Any, end: Any, xp: Any) -> tuple[Span, ...]:
        """See clean frames before `stop`, within the budget of a block that ends before `end`."""
        tokens = self.tokens_per_frame
        if self.sees_all_past:
            return self._dealt((end * 0, stop * tokens), self.shards, xp)
        recent = (self.start_of_window(end, xp) * tokens, stop * tokens)
        sink = (end * 0, xp.minimum(stop, self.sink) * tokens)
        of_sink = -(-self.sink * tokens // self.half)  # shards that hold a part of it
        return self._dealt(recent, self.shards, xp) + self._dealt(sink, of_sink, xp)

    def _dealt(self, clean: Span, shards: int, xp: Any) -> tuple[Span, ...]:
        """Find tokens of the clean video in the sequence, in the first so many shards."""
        if self.shards == 1:
            return (clean,) * shards
        (lo, hi), half = clean, self.half
        firsts = [i * half for i in range(shards)]
        return tuple((xp.maximum(lo, f) + f, xp.minimum(hi, f + half) + f) for f in firsts)

    def bound_to(self, lengths: Lengths) -> Mask:
        """Check that the keys are both halves of the video, then resolve the offset."""
        tokens = 2 * self.frames * self.tokens_per_frame
        bound = super().bound_to(lengths) if lengths.kv_len == tokens else None
        if bound is not None and 0 <= bound.offset <= tokens - lengths.q_len:  # pyright: ignore[reportAttributeAccessIssue]
            return bound
        of = f"2 * frames * tokens_per_frame = 2 * {self.frames} * {self.tokens_per_frame}"
        rule = (
            f"the keys are the clean video and the noisy one, {of} = {tokens} tokens, and the"
            " queries are of these"
        )
        found = f"{self} with q_len={lengths.q_len}, kv_len={lengths.kv_len}"
        raise InputError("mask", found, rule, "give both halves: stream.pair(clean, noisy)")

    def own_period(self) -> int | None:
        """Give the tokens of a block where blocks tile the halves, else those of a frame."""
        whole_blocks = not self.first_frame_alone and self.frames % self.frames_per_block == 0
        return self.tokens_per_frame * (self.frames_per_block if whole_blocks else 1)

    def row_blocks(self) -> tuple[RowBlocks, ...] | None:
        """Jump where a block of either half begins, by more where a half does or a budget ends."""
        offset = self.offset or 0
        if offset < 0:  # rows before the first one are in blocks of another size
            return None
        tokens, alone, half = self.tokens_per_frame, int(self.first_frame_alone), self.half
        size = self.frames_per_block * tokens
        begins = range(0, 2 * self.shards * half + 1, half)
        inner = (0, alone * tokens, self.first_over_budget() * tokens)
        turns = tuple(row - offset for row in self._turns(begins, inner))
        phases = {-alone * tokens % size, -(half + alone * tokens) % size}
        return tuple(RowBlocks(size, offset + phase, turns) for phase in sorted(phases))

    def _turns(self, begins: range, inner: tuple[int, ...]) -> tuple[int, ...]:
        """List the rows where a half begins, and where the video passes `inner` in each."""
        half = self.half
        rows = {b + i - b // (2 * half) * half for b in begins for i in inner}
        return tuple(sorted(set(begins) | rows))
