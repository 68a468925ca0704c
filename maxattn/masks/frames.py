"""Frames in blocks, within a budget of frames: what masks of video share."""

from __future__ import annotations

from typing import Any

import numpy as np

from maxattn.errors import InputError
from maxattn.masks.base import BIG
from maxattn.masks.position_mask import MOST, PositionMask, whole


class FrameMask(PositionMask):
    """Hold frames of tokens in blocks of frames, of which a query sees a budget.

    Args:
        frames, tokens_per_frame, frames_per_block, window, sink, first_frame_alone, offset: as in
            `VideoMask`.
    """

    frames: int
    tokens_per_frame: int
    frames_per_block: int
    window: int | None
    sink: int
    first_frame_alone: bool
    offset: int | None

    def __post_init__(self) -> None:
        """Check the numbers, and that the sink leaves room for a query's own block."""
        whole(self, "frames", least=1)
        check_blocks(self)
        whole(self, "offset", least=-MOST, optional=True)
        if self.frames * self.tokens_per_frame > self.most_tokens:
            rule = f"frames * tokens_per_frame is at most {self.most_tokens}"
            where, remedy = f"{type(self).__name__}.frames", "give the frames that are there"
            raise InputError(where, self.frames, rule, remedy)

    @property
    def most_tokens(self) -> int:
        """The most tokens of a video, which int32 positions hold."""
        return BIG

    @property
    def budget(self) -> int | None:
        """The most frames that a query sees; None without a window."""
        return None if self.window is None else self.window * self.frames_per_block

    @property
    def sees_all_past(self) -> bool:
        """Whether the budget is never exceeded. A larger one int32 may not hold."""
        return self.budget is None or self.budget >= self.frames

    def end_of_block(self, frame: Any, xp: Any) -> Any:
        """Give the first frame after the block of a frame."""
        alone, size = int(self.first_frame_alone), self.frames_per_block
        end = alone + ((frame - alone) // size + 1) * size
        # Before the first block there is nothing to round up to.
        return xp.minimum(xp.where(frame < alone, frame + 1, end), self.frames)

    def start_of_block(self, frame: Any, xp: Any) -> Any:
        """Give the first frame of the block of a frame."""
        alone, size = int(self.first_frame_alone), self.frames_per_block
        return xp.where(frame < alone, frame, alone + (frame - alone) // size * size)

    def start_of_window(self, end: Any, xp: Any) -> Any:
        """Give the first of the last frames that a block sees, which ends before frame `end`."""
        budget = self.budget or 0
        return xp.where(end <= budget, 0, end - (budget - self.sink))

    def first_over_budget(self) -> int:
        """Give the first frame whose block ends beyond the budget."""
        alone, size = int(self.first_frame_alone), self.frames_per_block
        return alone + ((self.budget or 0) - alone) // size * size

    def most_keys(self) -> int | None:
        """Count the tokens of the budget."""
        return None if self.budget is None else self.budget * self.tokens_per_frame


def check_blocks(value: Any) -> None:
    """Check the numbers of blocks, window and sink, and keep them as ints.

    Args:
        value: a mask, or any frozen value with the fields of `VideoMask` from `tokens_per_frame`
            to `first_frame_alone`.

    Raises:
        InputError: a number is out of range, or the sink leaves no room for a block.
    """
    for name in ("tokens_per_frame", "frames_per_block"):
        whole(value, name, least=1)
    whole(value, "window", least=1, optional=True)
    whole(value, "sink", least=0)
    alone = value.first_frame_alone
    if not isinstance(alone, bool | np.bool_):
        where = f"{type(value).__name__}.first_frame_alone"
        raise InputError(where, repr(alone), "it is True or False", "give one of them")
    object.__setattr__(value, "first_frame_alone", bool(alone))
    if value.window is None:
        return
    budget = value.window * value.frames_per_block
    most = budget - value.frames_per_block
    if value.sink > most:
        fits = f"the budget of {budget} frames (window * frames_per_block)"
        rule = f"sink and a query's own block both fit {fits}"
        remedy = f"give sink of at most {most}, or a larger window"
        raise InputError(f"{type(value).__name__}.sink", value.sink, rule, remedy)
