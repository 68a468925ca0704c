"""Fifty blocks in bfloat16: errors do not grow with the number of the block, and no memory does.

Clean latents are given, so that an error of one block is no other input of the next one. What is
left are the rounding of the model and of the cache, which later blocks read.
"""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from common.forcing import Forcing
from flax import nnx
from wan.model import WanTransformer3D

import maxattn as ma
from tests.examples.wan.streamed import SIDES, TOKENS, clips, empty, plain, small, text, times
from tests.waiting import but

BLOCKS, SETTLED = 50, 8  # blocks; those before the window has rolled in every case
EPS = float(jnp.finfo(jnp.bfloat16).eps)
STREAMS = {
    "window": ma.Stream(TOKENS, 3, 3),
    "sink": ma.Stream(TOKENS, 3, 4, sink=3),
    "frames": ma.Stream(TOKENS, 1, 5, sink=2),
}


def rounded() -> tuple[WanTransformer3D, WanTransformer3D]:
    """Return the model in bfloat16, and in float32 with the same rounded parameters."""
    low = small(dtype=jnp.bfloat16)
    state = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(x.dtype), nnx.state(low, nnx.Param)
    )
    exact = nnx.merge(nnx.graphdef(plain()), state)
    nnx.update(low, state)
    return low, exact


def forced(model: Any, stream: ma.Stream, clean: Any, noisy: Any) -> np.ndarray:
    """Return the velocity of all blocks by one forward under the mask of training."""
    graph, parameters = nnx.split(model)

    @jax.jit
    def run(parameters: Any, x: Any, clean: Any) -> Any:
        said = Forcing(stream, clean)
        return nnx.merge(graph, parameters)(x, times(x.shape[1]), text(), forcing=said)

    return np.asarray(run(parameters, noisy, clean), np.float32)


def rolled_out(
    model: Any, stream: ma.Stream, clean: Any, noisy: Any
) -> tuple[np.ndarray, list[int], int]:
    """Return the velocity of all blocks by the cache, bytes alive along the way, and programs."""
    graph, parameters = nnx.split(model)

    def run(parameters: Any, x: Any, t: Any, kv: Any, cache: Any) -> Any:
        return nnx.merge(graph, parameters)(x, t, kv=kv, cache=cache)

    step: Any = jax.jit(run, donate_argnums=4)
    kv, found, alive = model.encode(text()), [], []
    cache, t = empty(stream, 0, dtype="bfloat16"), times(clean.shape[1])
    for number, (start, stop) in enumerate(stream.blocks(clean.shape[1])):
        own = slice(start, stop)
        v, cache = step(parameters, noisy[:, own], t[:, own], kv, cache)
        _, cache = step(parameters, clean[:, own], 0 * t[:, own], kv, cache)
        cache = cache.advance()
        found.append(np.asarray(v, np.float32))
        del v
        if number in (SETTLED, BLOCKS - 1):
            gc.collect()
            alive.append(sum(x.nbytes for x in jax.live_arrays()))
    return np.concatenate(found, axis=1), alive, step._cache_size()


def by_block(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Return the mean error of each block, as a share of the mean size of the exact numbers."""
    off = np.abs(got - want).reshape(1, BLOCKS, -1).mean((0, 2))
    return off / np.abs(want).mean()


# A sink and a window, which blocks of one frame have too.
@pytest.mark.parametrize("name", but(STREAMS, ["sink"]))
def test_fifty_blocks_in_bfloat16_stay_within_its_error(name: str) -> None:
    stream, (low, exact) = STREAMS[name], rounded()
    clean, noisy = clips(BLOCKS * stream.frames_per_block)
    assert clean.shape[2:4] == SIDES
    want = forced(exact, stream, clean, noisy)
    got, alive, programs = rolled_out(low, stream, clean, noisy)
    cached, whole = by_block(got, want), by_block(forced(low, stream, clean, noisy), want)
    # As near as one forward in bfloat16, which reads no cache; some roundings, not more.
    assert cached.mean() < 1.5 * whole.mean() < 1.5 * 4 * EPS, (cached.mean(), whole.mean())
    early, late = cached[SETTLED : 2 * SETTLED].mean(), cached[-SETTLED:].mean()
    assert late < 1.5 * early, (early, late)
    assert alive[0] == alive[1] and programs <= 3
