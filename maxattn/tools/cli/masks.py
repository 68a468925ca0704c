"""Read masks from the text of a command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_

import numpy as np

from maxattn import masks
from maxattn.config.errors import plain
from maxattn.config.numbers import LARGEST, whole_in
from maxattn.errors import InputError, did_you_mean
from maxattn.masks import Mask

MOST_LENGTHS = 4096
MOST_NUMBERS = 256  # most numbers of rectangles, four each: an `or` of more takes long
MOST_MASKS = 16  # most masks joined by +: an `and` of more takes long


def _ids(*lengths: int) -> Mask:
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    return masks.Segments(ids, ids)


def _rectangles(*numbers: int) -> Mask:
    fours = [numbers[i : i + 4] for i in range(0, len(numbers), 4)]
    return reduce(or_, (masks.Rectangle(*four) for four in fours))


_FRAMES = "FRAMES,TOKENS[,PER_BLOCK[,WINDOW[,SINK]]]"
_MANY = range(1, MOST_LENGTHS + 1)
# By name: the constructor from numbers, how the numbers are written, and how many there are.
SPELLINGS: dict[str, tuple[Callable[..., Mask], str, range]] = {
    "full": (masks.Full, "", range(1)),
    "causal": (masks.Causal, "", range(1)),
    "window": (masks.LocalWindow, "LEFT,RIGHT", range(2, 3)),
    "block-window": (masks.BlockSlidingWindow, "BLOCK,WINDOW", range(2, 3)),
    "block-causal": (masks.BlockCausal, "BLOCK", range(1, 2)),
    "rectangle": (
        _rectangles, "Q_START,Q_STOP,KV_START,KV_STOP[,...]", range(4, MOST_NUMBERS + 1, 4)
    ),
    "segments": (lambda *n: masks.Segments.of_lengths(n), "LENGTH,LENGTH,...", _MANY),
    "segment-ids": (_ids, "LENGTH,LENGTH,...", _MANY),
    "lengths": (
        lambda *n: masks.KeyPadding(np.array(n, np.int32)), "KEYS,KEYS,...", _MANY
    ),
    "video": (masks.VideoMask, _FRAMES, range(2, 6)),
    "teacher": (masks.TeacherForcing, _FRAMES, range(2, 6)),
}  # fmt: skip


def read_mask(text: str) -> Mask:
    """Read a mask such as `causal`, `block-window:1560,7`, or several joined by + (and)."""
    parts = text.split("+")
    if len(parts) > MOST_MASKS:
        rule = f"at most {MOST_MASKS} masks may be joined"
        raise InputError("mask", f"{len(parts)} masks", rule, "leave some out")
    return reduce(lambda mask, part: mask & _read_one(part.strip()), parts, masks.Full())


def check_fits(text: str, q_len: int, kv_len: int, where: str) -> None:
    """Refuse numbers beyond the last query or key, in the words of a command line."""
    for part in text.split("+"):
        name, _, rest = part.strip().partition(":")
        numbers = [int(word) for word in rest.split(",")] if rest else []
        queries = [n for i, n in enumerate(numbers) if i % 4 < 2] if name == "rectangle" else []
        keys = [n for i, n in enumerate(numbers) if i % 4 > 1] if name == "rectangle" else []
        keys = numbers if name == "lengths" else keys
        for what, given, length in (("queries", queries, q_len), ("keys", keys, kv_len)):
            if given and max(given) > length:
                rule = f"{where} has {length} {what}, and {max(given)} is beyond them"
                remedy = f"write at most {length} for {what}"
                raise InputError("--mask", plain(part.strip()), rule, remedy)


def _spelling(name: str) -> str:
    form = SPELLINGS[name][1]
    return f"{name}:{form}" if form else name


def _read_one(text: str) -> Mask:
    name, _, rest = text.partition(":")
    if name not in SPELLINGS:
        rule = f"it must be one of {', '.join(map(_spelling, SPELLINGS))}"
        remedy = did_you_mean(name, SPELLINGS) or "write for example block-window:1560,7"
        raise InputError("mask", plain(text) if text else "(nothing)", rule, remedy)
    make, _, counts = SPELLINGS[name]
    numbers = [whole_in(word, least=0) for word in rest.split(",", counts[-1])] if rest else []
    if len(numbers) not in counts or None in numbers:
        rule = f"it must be {_spelling(name)}, with whole numbers up to {LARGEST}"
        raise InputError("mask", plain(text), rule, f"write {_spelling(name)}")
    return make(*numbers)
