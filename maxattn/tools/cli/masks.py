"""Masks as a user writes them on a command line."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from maxattn import masks
from maxattn.config.errors import plain
from maxattn.config.numbers import LARGEST, whole_in
from maxattn.errors import InputError, did_you_mean
from maxattn.masks import Mask

MOST_LENGTHS = 4096


def _segments(*lengths: int) -> Mask:
    return masks.Segments.of_lengths(lengths)


def _ids(*lengths: int) -> Mask:
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    return masks.Segments(ids, ids)


def _lengths(*lengths: int) -> Mask:
    return masks.KeyPadding(np.array(lengths, np.int32))


SPELLINGS: dict[str, tuple[Callable[..., Mask], str, tuple[int, int]]] = {
    "full": (masks.Full, "full", (0, 0)),
    "causal": (masks.Causal, "causal", (0, 0)),
    "window": (masks.LocalWindow, "window:LEFT,RIGHT", (2, 2)),
    "block-window": (masks.BlockSlidingWindow, "block-window:BLOCK,WINDOW", (2, 2)),
    "block-causal": (masks.BlockCausal, "block-causal:BLOCK", (1, 1)),
    "segments": (_segments, "segments:LENGTH,LENGTH,...", (1, MOST_LENGTHS)),
    "segment-ids": (_ids, "segment-ids:LENGTH,LENGTH,...", (1, MOST_LENGTHS)),
    "lengths": (_lengths, "lengths:KEYS,KEYS,...", (1, MOST_LENGTHS)),
    "video": (masks.VideoMask, "video:FRAMES,TOKENS[,PER_BLOCK[,WINDOW[,SINK]]]", (2, 5)),
    "teacher": (
        masks.TeacherForcing,
        "teacher:FRAMES,TOKENS[,PER_BLOCK[,WINDOW[,SINK]]]",
        (2, 5),
    ),
}
MOST_MASKS = 16  # that are joined: the work of an `and` grows with them


def read_mask(text: str) -> Mask:
    """Read a mask such as `causal`, `block-window:1560,7`, or two joined by + (both must allow).

    Raises:
        InputError: for a spelling or a number that is wrong.
    """
    parts = text.split("+")
    if len(parts) > MOST_MASKS:
        rule = f"at most {MOST_MASKS} masks are joined"
        raise InputError("mask", f"{len(parts)} masks", rule, "leave some out")
    mask: Mask = masks.Full()
    for part in parts:
        mask = mask & _read_one(part.strip())
    return mask


def _read_one(text: str) -> Mask:
    name, _, rest = text.partition(":")
    if name not in SPELLINGS:
        rule = f"it is one of {', '.join(form for _, form, _ in SPELLINGS.values())}"
        remedy = did_you_mean(name, SPELLINGS) or "write for example block-window:1560,7"
        raise InputError("mask", plain(text) if text else "(nothing)", rule, remedy)
    make, form, (least, most) = SPELLINGS[name]
    numbers = [whole_in(word, least=0) for word in rest.split(",", most)] if rest else []
    if not least <= len(numbers) <= most or None in numbers:
        rule = f"its numbers are whole, up to {LARGEST}, and as many as it takes"
        raise InputError("mask", plain(text), rule, f"write {form}")
    return make(*numbers)
