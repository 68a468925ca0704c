"""Masks as a user writes them on a command line."""

from __future__ import annotations

from collections.abc import Callable

from maxattn import masks
from maxattn.errors import InputError, did_you_mean
from maxattn.masks import Mask

SPELLINGS: dict[str, tuple[Callable[..., Mask], str, tuple[int, int]]] = {
    "full": (masks.Full, "full", (0, 0)),
    "causal": (masks.Causal, "causal", (0, 0)),
    "window": (masks.LocalWindow, "window:LEFT,RIGHT", (2, 2)),
    "block-window": (masks.BlockSlidingWindow, "block-window:BLOCK,WINDOW", (2, 2)),
    "block-causal": (masks.BlockCausal, "block-causal:BLOCK", (1, 1)),
    "video": (masks.VideoMask, "video:FRAMES,TOKENS[,PER_BLOCK[,WINDOW[,SINK]]]", (2, 5)),
}


def read_mask(text: str) -> Mask:
    """Read a mask such as `causal`, `block-window:1560,7`, or two joined by + (both must allow).

    Raises:
        InputError: for a spelling or a number that is wrong.
    """
    mask: Mask = masks.Full()
    for part in text.split("+"):
        mask = mask & _read_one(part.strip())
    return mask


def _read_one(text: str) -> Mask:
    name, _, rest = text.partition(":")
    if name not in SPELLINGS:
        rule = f"it is one of {', '.join(form for _, form, _ in SPELLINGS.values())}"
        remedy = did_you_mean(name, SPELLINGS) or "write for example block-window:1560,7"
        raise InputError("mask", text or "(nothing)", rule, remedy)
    make, form, (least, most) = SPELLINGS[name]
    numbers = [word.strip() for word in rest.split(",")] if rest else []
    if not least <= len(numbers) <= most or not all(word.isdecimal() for word in numbers):
        rule = "its numbers are whole, and as many as it takes"
        raise InputError("mask", text, rule, f"write {form}")
    return make(*map(int, numbers))
