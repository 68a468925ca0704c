"""Videos of a small Wan, block by block: their numbers, caches, prefixes and switches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from maxattn_examples.common.forcing import Forcing
from maxattn_examples.stream import Denoising, Reel, Rollout
from maxattn_examples.stream.denoising import noised

import maxattn as ma
from tests.examples.wan.streamed import SIDES, TOKENS, clips, plain, text
from tests.streaming.test_programs import copies
from tests.waiting import but

HOW = Denoising(denoising_steps=(1000, 500))
FRAME = (*SIDES, 4)
STREAM = ma.Stream(TOKENS, 3, 3, sink=2)
SINKS = {
    "sink": STREAM,
    "no_sink": ma.Stream(TOKENS, 3, 2),
    "alone": ma.Stream(TOKENS, 3, 3, sink=1, first_frame_alone=True),
    "frames": ma.Stream(TOKENS, 1, 4, sink=1),
}
close = partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)


@cache
def usual(name: str = "alone", how: Denoising = HOW) -> Rollout:
    """Make the rollout that tests share, so that they share its programs; it has no state."""
    return rollout(SINKS[name], how)


def rollout(stream: ma.Stream = STREAM, how: Denoising = HOW, **more: Any) -> Rollout:
    return Rollout(more.pop("model", None) or plain(), stream, FRAME, how, **more)


def told(seed: int = 0) -> Any:
    return plain().encode(text(seed=seed))


def made(run: Rollout, reel: Reel, count: int) -> tuple[jax.Array, Reel]:
    """Sample some blocks, and concatenate them."""
    parts = []
    for x, after in run.blocks(reel, count):
        parts.append(x)
        reel = after
    return jnp.concatenate(parts, axis=1), reel


def by_hand(run: Rollout, stream: ma.Stream, count: int, kv: Any) -> jax.Array:
    """Sample the same video without a cache: each step is a teacher-forced forward of all frames.

    No block attends to later ones, so one program of the full length serves them all.
    """
    model, how = plain(), run.how
    forced = jax.jit(lambda x, t, c: model(x, t, kv=kv, forcing=Forcing(stream, c)))
    last = stream.first_block + (count - 1) * stream.frames_per_block
    clean = np.zeros((1, last, *FRAME), np.float32)
    for start, stop in stream.blocks(last):
        numbers, noisy = jnp.arange(start, stop), np.zeros_like(clean)
        x = run._noise(numbers, 1, 0)
        for i, (sigma, after) in enumerate(zip(how.sigmas, how.sigmas[1:], strict=False)):
            noisy[:, start:stop] = x
            t = np.full((1, last), 1000 * sigma, np.float32)
            v = np.asarray(forced(noisy.copy(), t, clean.copy()))[:, start:stop]
            x = how.step(x, v, (sigma, after), run._noise(numbers, 1, i + 1))
        clean[:, start:stop] = x
    return jnp.asarray(clean)


def noisy_context(sigma: float) -> Denoising:
    """One step, and a clean pass with noise, for the tests of prefixes and switches."""
    return replace(HOW, denoising_steps=(1000,), sampler="flow_euler", context_noise=sigma)


# Other tests here sample by flow_euler too: guidance, and a switch in a rolled window.
SAMPLED = [("alone", "few_step"), ("frames", "flow_euler")]


@pytest.mark.parametrize(("name", "sampler"), but(SAMPLED, SAMPLED[:1]))
def test_a_video_is_what_forwards_without_a_cache_make(name: str, sampler: str) -> None:
    run, kv = usual(name, replace(HOW, sampler=sampler)), told()
    got, _ = made(run, run.begin(kv), 5)
    close(got, by_hand(run, SINKS[name], 5, kv))
    assert run.programs <= 3


@pytest.mark.slow
def test_many_blocks_are_three_programs_and_no_more_memory() -> None:
    run = rollout()
    reel, sizes = run.begin(told()), []
    given = reel.cache
    for number in range(20):
        x, reel = run.block(reel)
        if number in (5, 19):
            sizes.append(sum(a.nbytes for a in jax.live_arrays()))
    assert run.programs == 3 and sizes[0] == sizes[1]
    assert given is not None and given.k.is_deleted() and bool(jnp.isfinite(x).all())


@pytest.mark.parametrize("stage", but(["empty", "full"], ["empty"]))
def test_no_program_copies_the_cache(stage: str) -> None:
    """Two loops over layers, one of them inside a loop over steps, update one cache in place."""
    run, kv = usual(), told()
    reel = run.begin(kv) if stage == "empty" else made(run, run.begin(kv), 4)[1]
    cache = reel.cache
    assert cache is not None and cache.stage == stage
    given = run._parameters, cache, kv, np.int32(reel.frame)
    program = run._make.lower(*given, 1).compile()
    assert not copies(program.as_text(), cache.k.size)
    assert program.memory_analysis().alias_size_in_bytes >= cache.nbytes


@pytest.mark.slow
def test_without_a_clean_pass_the_first_block_keeps_its_last_step(monkeypatch: pytest.MonkeyPatch):
    """The earlier steps write nothing, but the cache is as if each had."""
    how = replace(HOW, clean_pass=False)
    run, writing = rollout(how=how), rollout(how=how)
    asked, unwritten = [], ma.KVCache.unwritten
    monkeypatch.setattr(ma.KVCache, "unwritten", lambda c: asked.append(c) or unwritten(c))
    x, reel = made(run, run.begin(told()), 1)
    assert len(asked) == 1, "one loop of all steps but the last"
    monkeypatch.setattr(ma.KVCache, "unwritten", lambda cache: cache)
    all_written, other = made(writing, writing.begin(told()), 1)
    assert reel.cache is not None and other.cache is not None
    close(x, all_written)
    close(reel.cache.k, other.cache.k)
    close(reel.cache.v, other.cache.v)
    assert reel.cache.stage == other.cache.stage and bool(reel.cache.k.any())


# ---- prefixes ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_prefix_is_the_same_in_one_pass_or_in_many() -> None:
    count = SINKS["alone"].first_block + 3
    run, (clean, _) = usual("alone", noisy_context(0.1)), clips(count)
    many, _ = made(run, run.prefix(run.begin(told()), clean), 3)
    one, _ = made(run, run.prefix(run.begin(told()), clean, at_once=True), 3)
    close(one, many)
    without, _ = made(run, run.begin(told()), 3)
    assert float(jnp.abs(without[:, :1] - many[:, :1]).max()) > 1e-3


def test_what_a_rollout_made_is_a_prefix_that_it_goes_on_from() -> None:
    run = usual()
    whole, _ = made(run, run.begin(told()), 5)
    rest, _ = made(run, run.prefix(run.begin(told()), whole[:, :4]), 3)
    close(rest, whole[:, 4:])


# ---- a change of prompt --------------------------------------------------------------------------


def test_a_switch_before_the_window_rolls_is_a_prefix_under_the_new_prompt() -> None:
    run = usual()
    first, reel = made(run, run.begin(told(0)), 2)
    got, _ = made(run, run.switch(reel, told(1)), 3)
    want, _ = made(run, run.prefix(run.begin(told(1)), first), 3)
    close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize("name", but(["alone", "sink"], ["alone"]))
def test_a_switch_in_a_rolled_window_caches_the_kept_frames_at_their_positions(name: str) -> None:
    """The next block equals one forward over the kept frames, with their noise, and the block."""
    stream, sigma = SINKS[name], {"alone": 0.1}.get(name, 0.0)
    run = usual(name, noisy_context(sigma))
    _, reel = made(run, run.begin(told(0)), 7)
    kept, frame = stream.kept(reel.frame), reel.frame
    clean = noised(reel.frames(kept), sigma, run._noise(jnp.asarray(kept), 1, len(run.how.sigmas)))
    assert len(kept) < frame
    x, after = run.block(run.switch(reel, told(1)))
    numbers = jnp.asarray((*kept, *range(frame, after.frame)))
    noise = run._noise(numbers[len(kept) :], 1, 0)
    of_kept = jnp.full((1, len(kept)), 1000 * sigma)
    t = jnp.concatenate([of_kept, jnp.full((1, x.shape[1]), 1000.0)], axis=1)
    mask = Forcing(replace(stream, first_frame_alone=False))
    clip = jnp.concatenate([clean, noise], axis=1)
    v = jax.jit(lambda *x: plain()(*x, kv=told(1), forcing=mask, positions=numbers))(clip, t)
    close(x, noise - v[:, len(kept) :])


# ---- guidance ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_guidance_is_a_batch_of_two_with_one_cache() -> None:
    guided = replace(HOW, guidance_scale=3.0, sampler="flow_euler")
    run = rollout(how=guided)
    kv = plain().encode(jnp.concatenate([text(seed=1), text(seed=2)]))
    got, reel = made(run, run.begin(kv), 4)
    assert reel.cache is not None and reel.cache.k.shape[1] == 2
    # The same by two caches.
    plain_run, caches = rollout(), [plain().cache(STREAM) for _ in range(2)]
    kvs, x0 = (told(1), told(2)), []
    call = jax.jit(lambda x, t, kv, c: plain()(x, t, kv=kv, cache=c))
    for start in range(0, 12, 3):
        x = plain_run._noise(jnp.arange(start, start + 3), 1, 0)
        for sigma, after in zip(guided.sigmas, guided.sigmas[1:], strict=False):
            t, found = jnp.full((1, 3), 1000 * sigma), []
            for row in range(2):
                v, caches[row] = call(x, t, kvs[row], caches[row])
                found.append(v)
            x = x + (after - sigma) * (found[0] + 3.0 * (found[1] - found[0]))
        for row in range(2):
            caches[row] = call(x, jnp.zeros((1, 3)), kvs[row], caches[row])[1].advance()
        x0.append(x)
    close(got, jnp.concatenate(x0, axis=1), atol=1e-4)


# ---- no cache from block to block ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", but(["alone", "no_sink"], ["alone"]))
def test_a_context_that_is_run_anew_is_a_masked_forward(name: str) -> None:
    stream = SINKS[name]
    run = rollout(stream, replace(HOW, denoising_steps=(1000,)), re_prefill=True)
    _, reel = made(run, run.begin(told()), 5)
    chosen = tuple(run._choose(reel.frame))
    context = reel.frames(chosen)
    x, after = run.block(reel)
    size = x.shape[1]
    noise = run._noise(jnp.arange(reel.frame, after.frame), 1, 0)
    t = jnp.concatenate([jnp.zeros((1, len(chosen))), jnp.full((1, size), 1000.0)], axis=1)
    clip = jnp.concatenate([context, noise], axis=1)
    forcing = Forcing(replace(stream, window=None, sink=0))
    v = jax.jit(lambda *x: plain()(*x, kv=told(), forcing=forcing))(clip, t)
    close(x, noise - v[:, len(chosen) :])
    assert len(chosen) + size <= (stream.budget or 0)


@pytest.mark.slow
def test_a_context_may_be_chosen() -> None:
    run = rollout(ma.Stream(TOKENS, 1, 6), re_prefill=lambda frame: range(frame)[:1])
    x, reel = made(run, run.begin(told()), 4)
    assert x.shape[1] == 4 and run.programs == 2 and reel.cache is None


def test_a_context_of_whole_blocks_keeps_the_sink_and_the_latest_frames() -> None:
    """The window shows frames 0 and 5 to 9, of which the first frame and one block remain."""
    run = rollout(SINKS["alone"], re_prefill=True)
    assert tuple(run._choose(10)) == (0, 7, 8, 9)
