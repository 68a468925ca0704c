"""Checks of a rollout's inputs, one rule a function."""

from __future__ import annotations

from typing import Any

import jax
from jax.core import Tracer

import maxattn as ma
from maxattn.errors import InputError
from maxattn_examples.common.split import Structure

from .reel import Reel

TWICE = "a reel is gone on from once"
LAST = "go on from the reel that was returned last; `save` keeps one"


def used_up(reel: Reel, what: str = TWICE, remedy: str = LAST) -> None:
    """Refuse a reel that was gone on from.

    Args:
        reel: that is used again.
        what: must be done before, in words.
        remedy: as errors say it.
    """
    if any(_is_deleted(x) for x in jax.tree.leaves(reel.cache)):
        rule = f"a cache is changed in place, so {what}"
        raise InputError("reel", f"frame {reel.frame}", rule, remedy)


def _is_deleted(x: Any) -> bool:
    """Check whether an array was donated; a traced array was not."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted()


def prefix(reel: Reel, latents: Any, stream: ma.Stream, sides: tuple[int, int, int]) -> None:
    """Refuse clean frames of other sizes, and those behind frames that are made."""
    used_up(reel)
    if reel.frame:
        rule = f"a prefix is the first of a video, and {reel.frame} frames are made"
        raise InputError("prefix", f"{latents.shape[1]} frames", rule, "give it after begin()")
    if latents.ndim != 5 or (latents.shape[0], *latents.shape[2:]) != (reel.batch, *sides):
        wanted = f"[{reel.batch}, F, {', '.join(map(str, sides))}]"
        remedy = "encode the image or video at this size"
        value = f"shape {tuple(latents.shape)}"
        raise InputError("prefix", value, f"clean latents are {wanted}", remedy)
    stream.check_frames("prefix", latents.shape[1])


def chosen(frames: tuple[int, ...], reel: Reel, stream: ma.Stream) -> None:
    """Refuse a choice of context that is not kept, or is no whole blocks."""
    kept = {s + i for s, block in reel.clean for i in range(block.shape[1])}
    if lost := [f for f in frames if f not in kept]:
        rule = f"the clean latents of these frames are kept: {sorted(kept)}"
        remedy = "choose of these, or give the stream a wider window or a sink"
        raise InputError("re_prefill", f"frame {lost[0]}", rule, remedy)
    if frames:
        stream.check_frames("re_prefill", len(frames))


def same_model(structure: Structure, own: Structure) -> None:
    """Refuse a model whose arrays would be taken for others."""
    if structure != own:
        rule = "what is compiled is of one model: its classes, layers and settings"
        remedy = "build it as the first one, or make another Rollout"
        raise InputError("model", "of another structure", rule, remedy)
