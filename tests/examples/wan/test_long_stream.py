"""Thirty blocks in bfloat16: errors do not grow with the number of the block.

The clean latents are fixed, so that the error of a block does not change the input of the next. The
remaining errors are the rounding of the model and of the cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from maxattn_examples.common.forcing import Forcing
from maxattn_examples.wan.model import WanTransformer3D

import maxattn as ma
from tests.examples.wan.streamed import TOKENS, clips, empty, plain, small, text, times

BLOCKS, SETTLED = 30, 8  # blocks; those before the window has rolled in every case
EPS = float(jnp.finfo(jnp.bfloat16).eps)
STREAM = ma.Stream(TOKENS, 3, 4, sink=3)


def rounded() -> tuple[WanTransformer3D, WanTransformer3D]:
    """Return the model in bfloat16, and in float32 with the same rounded parameters."""
    low = small(dtype=jnp.bfloat16)
    state = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(x.dtype), nnx.state(low, nnx.Param)
    )
    exact = nnx.merge(nnx.graphdef(plain()), state)
    nnx.update(low, state)
    return low, exact


def forced(model: Any, clean: Any, noisy: Any) -> np.ndarray:
    """Return the velocities of all blocks, from one forward under the training mask."""
    graph, parameters = nnx.split(model)

    @jax.jit
    def run(parameters: Any, x: Any, clean: Any) -> Any:
        forcing = Forcing(STREAM, clean)
        return nnx.merge(graph, parameters)(x, times(x.shape[1]), text(), forcing=forcing)

    return np.asarray(run(parameters, noisy, clean), np.float32)


def rolled_out(model: Any, clean: Any, noisy: Any) -> np.ndarray:
    """Return the velocities of all blocks, computed with the cache."""
    graph, parameters = nnx.split(model)

    def run(parameters: Any, x: Any, t: Any, kv: Any, cache: Any) -> Any:
        return nnx.merge(graph, parameters)(x, t, kv=kv, cache=cache)

    step: Any = jax.jit(run, donate_argnums=4)
    kv, found = model.encode(text()), []
    cache, t = empty(STREAM, 0, dtype="bfloat16"), times(clean.shape[1])
    for start, stop in STREAM.blocks(clean.shape[1]):
        own = slice(start, stop)
        v, cache = step(parameters, noisy[:, own], t[:, own], kv, cache)
        _, cache = step(parameters, clean[:, own], 0 * t[:, own], kv, cache)
        cache = cache.advance()
        found.append(np.asarray(v, np.float32))
    return np.concatenate(found, axis=1)


def by_block(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the mean error of each block, relative to the mean absolute value of exact numbers."""
    off = np.abs(got - want).reshape(1, BLOCKS, -1).mean((0, 2))
    return off / np.abs(want).mean()


@pytest.mark.slow
def test_thirty_blocks_in_bfloat16_stay_within_its_error() -> None:
    low, exact = rounded()
    clean, noisy = clips(BLOCKS * STREAM.frames_per_block)
    want = forced(exact, clean, noisy)
    got = rolled_out(low, clean, noisy)
    cached, whole = by_block(got, want), by_block(forced(low, clean, noisy), want)
    # As near as one forward in bfloat16, which reads no cache; some roundings, not more.
    assert cached.mean() < 1.5 * whole.mean() < 1.5 * 4 * EPS, (cached.mean(), whole.mean())
    early, late = cached[SETTLED : 2 * SETTLED].mean(), cached[-SETTLED:].mean()
    assert late < 1.5 * early, (early, late)


def test_modulations_of_frames_are_never_those_of_all_tokens_at_once() -> None:
    """[B, T, 6, D] would be a block's largest array, but one of six rows is used at a time."""
    x, t, cache, model = clips(3)[0], times(3), empty(STREAM, 3), plain()
    made = str(jax.make_jaxpr(lambda x, t, c: model(x, t, text(), cache=c))(x, t, cache))
    assert "f32[1,3,6,24]" in made and "f32[1,6,6,24]" not in made
