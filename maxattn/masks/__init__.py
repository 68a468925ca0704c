"""Masks: which query may attend to which key; they combine with `&`, `|` and `~`."""

from __future__ import annotations

from maxattn.masks.algebra import And, Empty, Full, Not, Or
from maxattn.masks.base import BIG, Mask
from maxattn.masks.blocks import EMPTY, FULL, MIXED
from maxattn.masks.data import Dense, KeyPadding, Segments
from maxattn.masks.for_kernels import Band
from maxattn.masks.packed import SegmentLengths
from maxattn.masks.positions import (
    BlockCausal,
    BlockSlidingWindow,
    Causal,
    KeyLimit,
    LocalWindow,
    PositionMask,
    Rectangle,
)
from maxattn.masks.rectangles import Rectangles
from maxattn.masks.tree import mask_type
from maxattn.masks.video import TeacherForcing, VideoMask

__all__ = [
    "BIG",
    "EMPTY",
    "FULL",
    "MIXED",
    "And",
    "Band",
    "BlockCausal",
    "BlockSlidingWindow",
    "Causal",
    "Dense",
    "Empty",
    "Full",
    "KeyLimit",
    "KeyPadding",
    "LocalWindow",
    "Mask",
    "Not",
    "Or",
    "PositionMask",
    "Rectangle",
    "Rectangles",
    "SegmentLengths",
    "Segments",
    "TeacherForcing",
    "VideoMask",
    "mask_type",
]
