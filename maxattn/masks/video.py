"""The mask of autoregressive video diffusion: blocks of frames, a window of them, a sink."""

from __future__ import annotations

from typing import Any

from maxattn.errors import InputError
from maxattn.masks.base import Lengths, Mask, Span
from maxattn.masks.frames import FrameMask
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.tree import mask_type


@mask_type
class VideoMask(FrameMask):
    """Allow a query the frames up to the end of its own block of frames, within a budget of frames.

    With `end` the first frame after the query's block and `budget = window * frames_per_block`: the
    query sees frames `[0, end)` while `end <= budget`, and then the first `sink` frames and the
    last `budget - sink` before `end`, so that no query ever sees more than `budget` frames.

    Args:
        frames: frames in the video; the keys are `frames * tokens_per_frame` tokens. The last block
            has those that are left.
        tokens_per_frame: tokens in a frame.
        frames_per_block: frames that are made together and see each other.
        window: blocks in the budget, the query's own included; None for all.
        sink: first frames that stay visible, counted inside the budget.
        first_frame_alone: whether frame 0 is a block of its own, before the blocks of
            `frames_per_block`.
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

    frames: int
    tokens_per_frame: int
    frames_per_block: int = 1
    window: int | None = None
    sink: int = 0
    first_frame_alone: bool = False
    offset: int | None = None

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See to the end of one's block, or the sink and the last frames of the budget."""
        tokens = self.tokens_per_frame
        end = self.end_of_block(pos // tokens, xp)
        if self.sees_all_past:
            return ((None, end * tokens),)
        recent = (self.start_of_window(end, xp) * tokens, end * tokens)
        return (recent, (None, xp.minimum(end, self.sink) * tokens)) if self.sink else (recent,)

    def bound_to(self, lengths: Lengths) -> Mask:
        """Check that the keys are the whole video, then resolve the offset."""
        tokens = self.frames * self.tokens_per_frame
        if lengths.kv_len != tokens:
            rule = (
                f"the keys are frames * tokens_per_frame = {self.frames} * {self.tokens_per_frame}"
                f" = {tokens} tokens"
            )
            remedy = "give the frames that the keys hold, or only those keys"
            raise InputError("mask", f"{self} with kv_len={lengths.kv_len}", rule, remedy)
        return super().bound_to(lengths)

    def own_block(self) -> tuple[int, int] | None:
        """Give a block of frames, where the budget is one block, and query 0 sits at key 0."""
        block = self.frames_per_block * self.tokens_per_frame
        is_alone = (self.window, self.first_frame_alone, self.offset) == (1, False, 0)
        return (block, block) if is_alone else None

    def own_period(self) -> int | None:
        """Give the tokens of a block, or of a frame when a lone first frame shifts the blocks."""
        return self.tokens_per_frame * (1 if self.first_frame_alone else self.frames_per_block)

    def row_blocks(self) -> tuple[RowBlocks, ...] | None:
        """Jump where a block of frames begins, and by more where the budget is first exceeded."""
        alone, offset, tokens = int(self.first_frame_alone), self.offset or 0, self.tokens_per_frame
        if alone and offset < 0:  # frames before the first one are blocks of another size
            return None
        size = self.frames_per_block * tokens
        turns = tuple(frame * tokens - offset for frame in (alone, self.first_over_budget()))
        return (RowBlocks(size, offset - alone * tokens, turns),)
