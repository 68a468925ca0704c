"""Which kernel computes which call on which hardware, as the kernels themselves say.

Nothing here knows a rule: each cell is what `maxattn.kernels.refusal` answers to one call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

import maxattn as ma
from maxattn import masks as m
from maxattn.kernels import KERNELS, build, refusal
from maxattn.kernels.auto import gpu
from maxattn.kernels.table import EXTRAS, TABLE

LENGTH, BLOCK = 4096, 256
PLAIN = ma.Call(1, LENGTH, LENGTH, 8, 8, 128, "bfloat16")
PACKAGES = tuple((package, version) for package, (_, version) in EXTRAS.items())
HARDWARE = {
    "CPU": "cpu",
    "A100": "NVIDIA A100",
    "H100": "NVIDIA H100",
    "H200": "NVIDIA H200",
    "B200, GB200": "NVIDIA B200",
    "B300, GB300": "NVIDIA B300",
    "RTX 50, RTX PRO": "NVIDIA GeForce RTX 5090",
    "MI300X": "AMD Instinct MI300X",
    "TPU v5p": "TPU v5p",
    "TPU v6e": "TPU v6e",
    "TPU v7x": "TPU v7x",
}
_LENGTHS, _IDS = np.array([4000]), np.zeros((1, LENGTH), np.int32)
_PADDING, _SEGMENTS = m.KeyPadding(_LENGTHS), m.Segments(_IDS, _IDS)
MASKS: dict[str, m.Mask] = {
    "`Full()`": m.Full(),
    "`Causal()`": m.Causal(),
    "`LocalWindow(128, 0)`": m.LocalWindow(128, 0),
    "`LocalWindow(128, 128)`": m.LocalWindow(128, 128),
    f"`BlockCausal({BLOCK})`": m.BlockCausal(BLOCK),
    f"`BlockSlidingWindow({BLOCK}, 4)`": m.BlockSlidingWindow(BLOCK, 4),
    "`VideoMask` with a window and a sink": m.VideoMask(16, BLOCK, window=4, sink=1),
    "`KeyPadding`": _PADDING,
    "`Segments`": _SEGMENTS,
    "`Dense`": m.Dense(np.ones((LENGTH, LENGTH), bool)),
    "`Causal() & KeyPadding`": m.Causal() & _PADDING,
    "`Causal() & Segments`": m.Causal() & _SEGMENTS,
    "`Causal() | KeyLimit(16)`": m.Causal() | m.KeyLimit(16),
    "`~Segments`": ~_SEGMENTS,
}


@dataclass(frozen=True)
class Asked:
    """Hold one row of the matrix: a call that differs from the plain one in one thing.

    Args:
        group, name: the heading above the row, and what the row says.
        call: what kernels are asked for.
        deterministic: whether the backward must repeat bit for bit.
    """

    group: str
    name: str
    call: ma.Call
    deterministic: bool = False


class Cell(NamedTuple):
    """Hold what one kernel answers: None computes it, else why not."""

    kernel: str
    reason: ma.Reason | None


def rows() -> tuple[Asked, ...]:
    """List the rows of the matrix."""
    bias, gqa, mqa = (1, 8, LENGTH, LENGTH), replace(PLAIN, kv_heads=2), replace(PLAIN, kv_heads=1)
    return (
        *(Asked("mask", name, replace(PLAIN, mask=mask)) for name, mask in MASKS.items()),
        *(Asked("dtype", f"`{d}`", replace(PLAIN, dtype=d)) for d in DTYPES),
        *(Asked("head dim", str(h), replace(PLAIN, head_dim=h, scale=0.0)) for h in HEAD_DIMS),
        Asked("head dim", "128, and 64 of the values", replace(PLAIN, value_head_dim=64)),
        Asked("heads", "8 query heads share 2 key heads (GQA)", gqa),
        Asked("heads", "8 query heads share 1 key head (MQA)", mqa),
        Asked("other", "an additive bias of q's dtype", replace(PLAIN, bias=bias)),
        Asked("other", "an additive float32 bias", replace(PLAIN, bias=bias, bias_dtype="float32")),
        Asked("other", "`return_lse=True`", replace(PLAIN, return_lse=True)),
        Asked("other", "1,000 queries, 77 keys", replace(PLAIN, q_len=1000, kv_len=77)),
        Asked("other", "`deterministic: true`", PLAIN, deterministic=True),
    )


DTYPES = ("bfloat16", "float16", "float32")
HEAD_DIMS = (40, 64, 80, 128, 192, 256, 512)


def cells(asked: Asked, target: ma.Target) -> tuple[Cell, ...]:
    """Return the answer of every kernel to one row."""
    answers = (refusal(name, asked.call, target, asked.deterministic) for name in KERNELS)
    return tuple(map(Cell, KERNELS, answers))


def target_of(kind: str) -> ma.Target:
    """Return a machine with every package that a kernel may need."""
    return ma.Target.named(kind, PACKAGES)


def runs_as(kernel: str, target: ma.Target) -> str:
    """Say what a kernel is on a machine, in the words of a plan."""
    if (reason := refusal(kernel, PLAIN, target)) is not None:
        return f"{kernel}: {reason.rule}"
    return build(kernel, PLAIN, ma.AttentionConfig(), target).lines(PLAIN).runs


def measured(target: ma.Target) -> str:
    """Say of a GPU whether `auto` goes by times that were measured on it; nothing elsewhere."""
    if target.platform != "gpu":
        return ""
    if gpu.is_measured_on(target):
        return "`auto` goes by times that were measured on this GPU."
    return (
        "Not measured on this GPU: a yes follows from the limits that the libraries state and from"
        " the kernels' own checks."
    )


def title(kernel: str) -> str:
    """Return what messages call a kernel."""
    return TABLE[kernel].title or kernel
