"""Refusals of a streaming model and of a rollout; messages: golden/wan_stream.txt."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from maxattn_examples.common.forcing import Forcing
from maxattn_examples.stream import Denoising, Reel, Rollout

import maxattn as ma
from maxattn.errors import MaxattnError
from tests.examples.wan.streamed import SIDES, TOKENS, clips, empty, plain, small, text, times
from tests.golden_text import check_refused

STREAM = ma.Stream(TOKENS, 3, 2)
CLEAN, NOISY = clips(6)
T = times(6)


def call(x: Any = NOISY[:, :3], t: Any = T[:, :3], **seen: Any) -> Any:
    return plain()(x, t, text(), **seen)


def streaming() -> ma.KVCache:
    return empty(STREAM, 6)


def of_layers(count: int) -> ma.KVCache:
    _, batch, _, heads, width = streaming().shape
    sizes = {"layers": count, "batch": batch, "kv_heads": heads, "dim_head": width}
    return STREAM.cache(**sizes, dtype="float32")


def forced(clean: Any = CLEAN, t_clean: Any = None, t: Any = T) -> Any:
    return call(NOISY, t, forcing=Forcing(STREAM, clean, t_clean))


def gradient() -> Any:
    def loss(model: Any) -> jax.Array:
        t = jnp.zeros((1, 3))
        return model(NOISY[:, :3], t, text(), cache=streaming())[0].sum()

    return nnx.grad(loss)(plain())


CHOSEN: list[int] = []


@cache
def rollout(re_prefill: bool = False) -> Rollout:
    """Make the rollout that tests share, to share its programs; `CHOSEN` is its context."""
    how: Any = {"re_prefill": lambda frame: CHOSEN if frame else []} if re_prefill else {}
    return Rollout(plain(), STREAM, (*SIDES, 4), Denoising((1000,)), **how)


def begun(run: Rollout) -> Reel:
    return run.begin(plain().encode(text()))


def second(run: Rollout) -> Reel:
    """Sample the first block, and return the reel for the second."""
    return run.block(begun(run))[1]


def again(how: str) -> Any:
    """Continue one reel twice."""
    run, reel = rollout(), second(rollout())
    run.block(reel)
    return run.block(reel) if how == "block" else run.switch(reel, plain().encode(text()))


def chosen(*frames: int) -> Any:
    CHOSEN[:] = frames
    return rollout(True).block(second(rollout(True)))


BAD: dict[str, Callable[[], Any]] = {
    # the model
    "one_time_beside_a_cache": lambda: call(t=T[:, 0], cache=streaming()),
    "times_of_other_frames": lambda: call(t=T, cache=streaming()),
    "one_time_beside_clean_frames": lambda: forced(t=T[:, 0]),
    "a_block_of_another_length": lambda: call(NOISY, T, cache=streaming()),
    "other_tokens": lambda: call(cache=empty(ma.Stream(4, 3, 2), 6)),
    "other_tokens_of_forcing": lambda: call(forcing=Forcing(ma.Stream(4, 3), CLEAN[:, :3])),
    "forcing_beside_a_stream": lambda: call(cache=streaming(), forcing=Forcing(STREAM)),
    "clean_beside_a_cache": lambda: call(
        cache=streaming().extract(), forcing=Forcing(STREAM, CLEAN[:, :3])
    ),
    "an_image_of_another_kind": lambda: call(cache=streaming(), image=jnp.zeros((1, 5, 10))),
    "an_image_beside_kv": lambda: plain()(
        NOISY, T, kv=plain().encode(text()), image=jnp.zeros((1, 5, 10))
    ),
    "clean_of_another_shape": lambda: forced(CLEAN[:, :3]),
    "times_without_a_clean_clip": lambda: forced(None, T),
    "times_of_clean_for_each_video": lambda: forced(t_clean=T[:, 0]),
    "under_a_gradient": gradient,
    # steps
    "steps_that_rise": lambda: Denoising((500, 1000)),
    "steps_beyond_noise": lambda: Denoising((1500, 500)),
    "steps_to_nothing": lambda: Denoising((1000, 0)),
    "no_steps": lambda: Denoising(()),
    "a_shift_of_nothing": lambda: Denoising(timestep_shift=0.0),
    "a_sampler_of_another_name": lambda: Denoising(sampler="euler"),
    "a_shift_that_is_no_number": lambda: Denoising(timestep_shift=float("nan")),
    "a_guidance_that_is_no_number": lambda: Denoising(guidance_scale=float("nan")),
    "noise_of_no_clean_pass": lambda: Denoising(context_noise=0.1, clean_pass=False),
    "context_of_noise": lambda: Denoising(context_noise=1.0),
    "a_cache_of_fewer_layers": lambda: call(cache=of_layers(1)),
    "a_cache_of_more_layers": lambda: call(cache=of_layers(3)),
    "a_layer_of_a_cache": lambda: call(cache=streaming().layer(0)),
    "a_stream_for_forcing": lambda: call(NOISY, T, forcing=STREAM),
    # a rollout
    "a_prefix_later": lambda: rollout().prefix(second(rollout()), CLEAN[:, :3]),
    "a_prefix_of_other_sides": lambda: rollout().prefix(begun(rollout()), CLEAN[:, :3, :1]),
    "a_prefix_not_whole": lambda: rollout().prefix(begun(rollout()), CLEAN[:, :2]),
    "a_context_that_is_gone": lambda: chosen(0, 1, 9),
    "a_reel_twice": lambda: again("block"),
    "a_switch_of_a_reel_that_is_used": lambda: again("switch"),
    "weights_of_a_model_built_otherwise": lambda: rollout().update(small(scan_layers=False)),
    "a_context_not_whole": lambda: chosen(0, 1),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals_say_what_and_why_and_what_to_do(name: str) -> None:
    check_refused(f"wan_stream/{name}", MaxattnError, BAD[name])
