"""Streams digits of any length from a model that was trained by forcing, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from maxattn_examples.common.pictures import from_model
from maxattn_examples.common.settings import MOST
from maxattn_examples.stream import Denoising, Rollout

from . import text
from .model import WanTransformer
from .settings import Settings

Videos = Float[np.ndarray, "n F H W"]
Told = dict[str, Any]  # the words of all rows, and their keys and values


def rollout_of(model: WanTransformer, settings: Settings, clean_pass: bool = True) -> Rollout:
    """How videos are made: Euler steps, a clean pass, guidance as rows of one batch.

    Args:
        model: trained.
        settings: `rollout`, and guidance and seed of `sampling`.
        clean_pass: False lets later blocks see the last step's noisy keys, for contrast.
    """
    said, sampling, stream = settings.rollout, settings.sampling, settings.stream
    assert said is not None and stream is not None, "the settings have a rollout"
    clean_pass = said.clean_pass and clean_pass
    how = Denoising(
        said.denoising_steps,
        said.warp_steps,
        said.timestep_shift,
        "flow_euler",
        said.context_noise / MOST if clean_pass else 0.0,  # it is the noise of that pass
        clean_pass,
        sampling.guidance_scale,
    )
    sides, seed = settings.video_shape[1:], sampling.seed
    return Rollout(model, stream, sides, how, seed=seed, call=_call, time_scale=1.0)


def told(model: WanTransformer, prompts: Sequence[str], guided: bool) -> Told:
    """Encode prompts, behind as many empty ones where there is guidance.

    Args:
        model: trained.
        prompts: any words of the vocabulary.
        guided: whether there is.
    """
    rows = [*[""] * (len(prompts) if guided else 0), *prompts]
    words = jnp.asarray(text.encode(rows))
    return {"words": words, "kv": model.encode(words)}


def stream(
    model: WanTransformer,
    prompts: Sequence[str],
    blocks: int,
    settings: Settings,
    *,
    clean_pass: bool = True,
    switch: tuple[int, Sequence[str]] | None = None,
) -> Videos:
    """Stream a video for each prompt.

    Args:
        model: trained.
        prompts: any words of the vocabulary.
        blocks: of each video.
        settings: how.
        clean_pass: as for `rollout_of`.
        switch: the block before which the prompts change, and the prompts from there on.

    Returns:
        Ink from 0 to 16.
    """
    rollout = rollout_of(model, settings, clean_pass)
    guided = rollout.how.rows == 2
    reel = rollout.begin(told(model, prompts, guided), len(prompts))
    made: list[Any] = []
    for number in range(blocks):
        if switch is not None and number == switch[0]:
            reel = rollout.switch(reel, told(model, switch[1], guided))
        latents, reel = rollout.block(reel)
        made.append(np.asarray(latents))
    return from_model(np.concatenate(made, axis=1))


def _call(model: WanTransformer, latents: Any, t: Any, what: Told, **seen: Any) -> Any:
    return model(latents, t, what["words"], what["kv"], **seen)
