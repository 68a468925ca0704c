"""The attentions of image and video models: diffusers' own classes, and our modules for them."""

from __future__ import annotations

from tests.weights.families import flux, hunyuan, image, ltx, video
from tests.weights.families.case import Attention, drawn, theirs

FAMILIES: dict[str, Attention] = (
    flux.ATTENTIONS | image.ATTENTIONS | video.ATTENTIONS | hunyuan.ATTENTIONS | ltx.ATTENTIONS
)

__all__ = ["FAMILIES", "Attention", "drawn", "theirs"]
