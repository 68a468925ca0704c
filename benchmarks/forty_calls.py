"""Forty attention calls of models, for `model_calls.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np


class ModelCall(NamedTuple):
    """One attention call of a model.

    Args:
        name: for `--only`.
        shape: B, T, S, N, H, and K if there are fewer key heads.
        mask: makes the mask from the module `maxattn.masks`; arrays in it are traced.
        kept: about the share of pairs that the mask allows; sets how many calls are chained.
        dtype: of q, k and v.
        role: "self" or "cross".
        share: the share of its model's step that all such cross-attentions take, the same in
            training and denoising (times of calls and steps are in docs/results.md).
        bias: the shape of an additive bias, or ().
    """

    name: str
    shape: tuple[int, ...]
    mask: Callable[[Any], Any] | None = None
    kept: float = 1.0
    dtype: str = "bfloat16"
    role: str = "self"
    share: float = 1.0
    bias: tuple[int, ...] = ()


RAGGED = (9000, 901, 4680, 1560, 7020, 2048, 3120, 1333, 5200, 977, 2340, 6240, 1100, 3008)


def model_calls(tiny: bool = False) -> tuple[ModelCall, ...]:
    """Return the calls; `tiny` divides their lengths by 120, for a CPU."""
    n: Callable[[int], int] = (lambda tokens: max(tokens // 120, 4)) if tiny else int
    frame, frame_5b = n(1560), n(880)
    video, video_14b, video_5b = 21 * frame, 21 * n(3600), 31 * frame_5b
    ragged = tuple(map(n, RAGGED))
    image, text = n(4096), n(512)
    cross = partial(ModelCall, role="cross")
    return (
        # The nine shapes of docs/results.md.
        ModelCall("wan-1.3b-480p", (1, video, video, 12, 128)),
        ModelCall("wan-14b-720p", (1, video_14b, video_14b, 40, 128)),
        cross("wan-1.3b-cross", (1, video, text, 12, 128), share=0.014),
        ModelCall("flux-1024", (2, image + text, image + text, 24, 128)),
        ModelCall("sdxl-64", (16, image, image, 10, 64)),
        ModelCall("sdxl-32", (16, n(1024), n(1024), 20, 64)),
        cross("sdxl-64-cross", (16, image, n(77), 10, 64), share=0.0045),
        ModelCall("blocks-1560x7", (1, video, video, 12, 128),
                  lambda m: m.BlockSlidingWindow(frame, 7), 0.29),
        ModelCall("blocks-256x16", (1, n(32768), n(32768), 12, 64),
                  lambda m: m.BlockSlidingWindow(n(256), 16), 0.12),
        # Other models.
        ModelCall("wan-2.2-5b", (1, video_5b, video_5b, 24, 128)),
        ModelCall("sd3.5-large", (2, image + n(333), image + n(333), 38, 64)),
        ModelCall("sd1.5-40", (16, image, image, 8, 40), dtype="float16"),
        ModelCall("sd1.5-160", (16, n(256), n(256), 8, 160), dtype="float16"),
        ModelCall("pixart-72", (4, image, image, 16, 72)),
        ModelCall("hunyuan-video", (1, n(46080) + n(256), n(46080) + n(256), 24, 128),
                  lambda m: m.KeyPadding(np.array([n(46080) + n(60)], np.int32))),
        ModelCall("qwen-image", (2, image + text, image + text, 24, 128),
                  lambda m: m.KeyPadding(np.array([image + n(77), image + text], np.int32))),
        # Masks of positions.
        ModelCall("causal-2k", (8, n(2048), n(2048), 16, 128), lambda m: m.Causal(), 0.5),
        ModelCall("causal-8k", (2, n(8192), n(8192), 16, 128), lambda m: m.Causal(), 0.5),
        ModelCall("causal-16k", (1, n(16384), n(16384), 16, 128), lambda m: m.Causal(), 0.5),
        ModelCall("window", (1, n(16384), n(16384), 16, 128),
                  lambda m: m.LocalWindow(n(2048), n(2048)), 0.25),
        ModelCall("grouped-heads", (2, image, image, 32, 128, 8)),
        # Blocks and frames of a stream beside its cache.
        ModelCall("block", (1, 3 * frame, video, 12, 128)),
        ModelCall("block-12-frames", (1, 3 * frame, 12 * frame, 12, 128)),
        ModelCall("frame", (1, frame, video, 12, 128)),
        ModelCall("block-14b", (1, 3 * frame, video, 40, 128)),
        ModelCall("frame-14b", (1, frame, video, 40, 128)),
        ModelCall("block-5b", (1, 8 * frame_5b, 32 * frame_5b, 24, 128)),
        ModelCall("block-causal", (1, video, video, 12, 128),
                  lambda m: m.VideoMask(21, frame, frames_per_block=3), 0.57),
        ModelCall("teacher-forcing", (1, 2 * video, 2 * video, 12, 128),
                  lambda m: m.TeacherForcing(21, frame, frames_per_block=3), 0.29),
        ModelCall("rectangles", (1, 2 * image + text, 2 * image + text, 24, 128),
                  lambda m: m.Rectangle(0, image + text, 0, 2 * image + text)
                  | m.Rectangle(image + text, 2 * image + text, image + text, 2 * image + text),
                  0.75),
        # Segments: traced ids, and known lengths.
        ModelCall("8-segments", (1, 8 * image, 8 * image, 12, 128),
                  lambda m: _segments(m, 8 * (image,)), 0.125),
        ModelCall("32-segments", (1, 32 * n(1024), 32 * n(1024), 12, 128),
                  lambda m: _segments(m, 32 * (n(1024),)), 0.031),
        ModelCall("32-segments-known", (1, 32 * n(1024), 32 * n(1024), 12, 128),
                  lambda m: m.Segments.of_lengths(32 * (n(1024),)), 0.031),
        ModelCall("ragged", (1, sum(ragged), sum(ragged), 12, 128),
                  lambda m: _segments(m, ragged), 0.1),
        ModelCall("ragged-known", (1, sum(ragged), sum(ragged), 12, 128),
                  lambda m: m.Segments.of_lengths(ragged), 0.1),
        # Text, a bias, and short rows.
        cross("text-lengths", (2, video, text, 12, 128),
              lambda m: m.KeyPadding(np.array([n(60), text], np.int32)), share=0.014),
        cross("wan-14b-cross", (1, video_14b, text, 40, 128), share=0.006),
        cross("sdxl-32-cross", (16, n(1024), n(77), 20, 64), share=0.0145),
        ModelCall("bias", (2, image, image, 10, 64), bias=(2, 10, image, image)),
        ModelCall("64-short-rows", (64, n(256), n(256), 16, 64)),
    )  # fmt: skip


def _segments(masks: Any, lengths: tuple[int, ...]) -> Any:
    ids = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None]
    return masks.Segments(ids, ids)
