"""Flow matching of prompted videos: learn the line from data to noise, then walk it backwards."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import maxattn as ma
from maxattn.steps import resolve
from maxattn_examples import samplers
from maxattn_examples.samplers import flow_euler
from maxattn_examples.train import flow, forcing
from maxattn_examples.train.settings import MOST
from maxattn_examples.train.task import Arrays

from .model import Video, WanTransformer, Words
from .settings import SamplingSettings, TrainingSettings
from .switches import switched
from .text import PAD, drop

TURNED = 0.7  # share of the clips whose sink is further away than the clip begins


def noised(video: Video, words: Words, key: Array, training: TrainingSettings) -> Arrays:
    """Draw times and noise; replace some prompts by the empty one.

    Args:
        video: clean videos, -1..1.
        words: token ids of their prompts.
        key: of times, noise and dropped prompts.
        training: `timestep_shift` and `prompt_dropout`.
    """
    times, noises, drops = jax.random.split(key, 3)
    drawn = flow.noised(video, flow.times(times, len(video), training.timestep_shift), noises)
    return drawn._asdict() | {"words": drop(words, training.prompt_dropout, drops)}


def forced(
    video: Video,
    words: Words,
    key: Array,
    training: TrainingSettings,
    stream: ma.Stream,
    before: Video | None = None,
) -> Arrays:
    """Draw a time for each block, and noise; replace some prompts by the empty one.

    Args:
        video, words, key, training: as for `noised`.
        stream: the blocks.
        before: clips of other digits that move alike, for `training.prompt_switches`.
    """
    noises, drops, turns, switches = jax.random.split(key, 4)
    context = training.context_noise / MOST if training.forcing == "teacher" else None
    how = stream, training.timestep_shift, context, training.context_dropout
    words, past = drop(words, training.prompt_dropout, drops), before
    if before is not None:
        # Where no prompt says another digit, the one that is seen goes on.
        share = training.prompt_switches * (words != PAD).any(-1)
        past = switched(switches, video, before, share, stream)
    drawn = forcing.noised(video, noises, forcing.Noise(*how), past) | {"words": words}
    if training.sink_distance:
        drawn["positions"] = turned(turns, video.shape, training.sink_distance, stream)
    return drawn


def turned(key: Array, shape: tuple[int, ...], most: int, stream: ma.Stream) -> Int[Array, "B F"]:
    """Number the frames after the sink some whole turns of the torus further on.

    The longer a video, the further away is its sink. A digit is back where it was after a turn, so
    clips that are short teach sinks of any distance.

    Args:
        key: of what is drawn.
        shape: of the clips, [B, F, H, W, C]; a turn is as many frames as H.
        most: frames of all turns.
        stream: says the sink.
    """
    count, frames, turn = shape[:3]
    for_turns, for_some = jax.random.split(key)
    turns = jax.random.randint(for_turns, (count, 1), 0, most // turn + 1)
    some = jax.random.bernoulli(for_some, TURNED, (count, 1))
    frame = jnp.arange(frames)
    return frame + jnp.where((frame >= stream.sink) & some, turn * turns, 0)


def loss(model: WanTransformer, examples: Arrays) -> Float[Array, ""]:
    """Measure how far the predicted velocity is from the true one.

    Args:
        model: what predicts.
        examples: from `noised`.
    """
    how: dict[str, Any] = {}
    if examples["times"].ndim == 2 and model.stream is not None:
        how["forcing"] = forcing.seen(examples, model.stream)
        how["positions"] = examples.get("positions")
    velocity = model(examples["mixed"], examples["times"], examples["words"], **how)
    return jnp.mean((velocity - examples["velocity"]) ** 2)


def loss_of(
    model: WanTransformer, video: Video, words: Words, key: Array, training: TrainingSettings
) -> Float[Array, ""]:
    """Draw times and noise, and measure the loss; `noised` names the arguments."""
    return loss(model, noised(video, words, key, training))


@partial(nnx.jit, static_argnames="sampling")
def sample(model: WanTransformer, words: Words, noise: Video, sampling: SamplingSettings) -> Video:
    """Walk from noise to videos in Euler steps, away from the empty prompt's prediction.

    Args:
        model: what predicts velocities.
        words: token ids of the prompts.
        noise: where to start.
        sampling: `num_inference_steps`, `guidance_scale` and `timestep_shift`.
    """
    scale, nothing = sampling.guidance_scale, jnp.full_like(words, PAD)
    told = words if scale == 1.0 else jnp.concatenate([nothing, words])
    known = told, model.encode(told)

    def predict(x: Array, t: Array, which: str) -> Array:
        x = jnp.concatenate([x, x]) if which == "both" else x
        return model(x, jnp.broadcast_to(t, x.shape[:1]), *known)

    steps = resolve(None, sampling.num_inference_steps, 1, scale != 1.0)
    grid = np.linspace(1.0, 0.0, sampling.num_inference_steps + 1)
    sigmas = flow_euler.shifted(grid, sampling.timestep_shift)
    schedule = flow_euler.over(sigmas, train_steps=1)
    return samplers.sample(predict, noise, schedule, None, steps, scale, batched=True)
