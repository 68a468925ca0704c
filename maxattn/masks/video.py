"""The mask of autoregressive video diffusion: blocks of frames, a window of them, a sink."""

from __future__ import annotations

from typing import Any

from maxattn.errors import InputError
from maxattn.masks.base import BIG, Lengths, Mask, Span
from maxattn.masks.position_mask import MOST, PositionMask, whole
from maxattn.masks.row_runs import RowBlocks
from maxattn.masks.tree import mask_type


@mask_type
class VideoMask(PositionMask):
    """Allow a query the frames up to the end of its own block of frames, within a budget of frames.

    With `end` the first frame after the query's block and `budget = window * frames_per_block`: the
    query sees frames `[0, end)` while `end <= budget`, and then the first `sink` frames and the
    last `budget - sink` before `end`, so that no query ever sees more than `budget` frames.

    Args:
        frames: frames in the video; the keys are `frames * tokens_per_frame` tokens.
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

    def __post_init__(self) -> None:
        """Check the numbers, and that the sink leaves room for a query's own block."""
        for name in ("frames", "tokens_per_frame", "frames_per_block"):
            whole(self, name, least=1)
        whole(self, "window", least=1, optional=True)
        whole(self, "sink", least=0)
        whole(self, "offset", least=-MOST, optional=True)
        object.__setattr__(self, "first_frame_alone", bool(self.first_frame_alone))
        if self.frames * self.tokens_per_frame > BIG:
            rule = f"frames * tokens_per_frame is at most {BIG}"
            raise InputError(
                "VideoMask.frames", self.frames, rule, "give the frames that are there"
            )
        budget = self.budget
        most = self.sink if budget is None else budget - self.frames_per_block
        if self.sink > most:
            rule = (
                f"sink and a query's own block both fit the budget of {budget} frames (window *"
                " frames_per_block)"
            )
            raise InputError(
                "VideoMask.sink",
                self.sink,
                rule,
                f"give sink of at most {most}, or a larger window",
            )

    @property
    def budget(self) -> int | None:
        """The most frames that a query sees; None without a window."""
        return None if self.window is None else self.window * self.frames_per_block

    def seen(self, pos: Any, xp: Any) -> tuple[Span, ...]:
        """See to the end of one's block, or the sink and the last frames of the budget."""
        tokens, budget = self.tokens_per_frame, self.budget
        end = self._end(pos // tokens, xp)
        if budget is None or budget >= self.frames:  # which int32 may not hold
            return ((None, end * tokens),)
        start = xp.where(end <= budget, 0, end - (budget - self.sink))
        recent = (start * tokens, end * tokens)
        return (recent, (None, xp.minimum(end, self.sink) * tokens)) if self.sink else (recent,)

    def _end(self, frame: Any, xp: Any) -> Any:
        """Give the first frame after the block of a frame."""
        alone, size = int(self.first_frame_alone), self.frames_per_block
        end = alone + ((frame - alone) // size + 1) * size
        # Before the first block there is nothing to round up to.
        return xp.minimum(xp.where(frame < alone, frame + 1, end), self.frames)

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

    def own_period(self) -> int | None:
        """Give the tokens of a block, or of a frame when a lone first frame shifts the blocks."""
        return self.tokens_per_frame * (1 if self.first_frame_alone else self.frames_per_block)

    def row_blocks(self) -> tuple[RowBlocks, ...] | None:
        """Jump where a block of frames begins, and by more where the budget is first exceeded."""
        alone, offset, tokens = int(self.first_frame_alone), self.offset or 0, self.tokens_per_frame
        if alone and offset < 0:  # frames before the first one are blocks of another size
            return None
        size = self.frames_per_block
        last = alone + ((self.budget or 0) - alone) // size * size  # frames within the budget
        turns = tuple(frame * tokens - offset for frame in (alone, last))
        return (RowBlocks(size * tokens, offset - alone * tokens, turns),)

    def most_keys(self) -> int | None:
        """Count the tokens of the budget."""
        return None if self.budget is None else self.budget * self.tokens_per_frame
