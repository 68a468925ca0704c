"""Refusals of streams and caches; messages: golden/streaming.txt."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import maxattn as ma
from maxattn.errors import MaxattnError
from maxattn.masks import Causal, KeyPadding
from tests.golden_text import check_refused
from tests.streaming.stack import programs
from tests.streaming.test_rollouts import mesh_of

STREAM, ENDLESS, STREAM_6 = ma.Stream(4, 3, 2), ma.Stream(4, 3), ma.Stream(6, 1, 2)
SIZES: Any = {"layers": 2, "batch": 1, "kv_heads": 2, "dim_head": 8, "dtype": "float32"}
X = jnp.zeros((1, 12, 16))


def attn(**how: Any) -> ma.FlaxAttention:
    sizes = {"heads": 2, "dim_head": 8, "rngs": nnx.Rngs(0)}
    return ma.FlaxAttention(16, **{**sizes, **how})


def empty(stream: ma.Stream = STREAM, **how: Any) -> ma.KVCache:
    return stream.cache(**{**SIZES, **how})


def made(stream: ma.Stream = STREAM, **how: Any) -> ma.KVCache:
    cache = empty(stream, **how)
    return attn()(X, cache=cache.layer(0))[1].advance()


def refilling() -> ma.KVCache:
    return made().refill()


def rerun() -> ma.KVCache:
    """Recompute the frames in the window after nine frames."""
    cache = made()
    for _ in range(2):
        cache = call(cache)[1].advance()
    cache = cache.refill()
    for _ in range(2):
        cache = call(cache)[1].advance()
    return cache


def donated() -> ma.KVCache:
    cache = made()
    jax.jit(lambda c: c, donate_argnums=0)(cache)
    return cache


def bfloat16_made() -> ma.KVCache:
    return replace(made(), k=made().k.astype("bfloat16"), v=made().v.astype("bfloat16"))


def call(cache: Any, x: Any = X, **how: Any) -> Any:
    """Call a layer with the first layer of a cache."""
    module = attn(**how.pop("module", {}))
    return module(x, cache=cache.layer(0) if isinstance(cache, ma.KVCache) else cache, **how)


def gradient() -> Any:
    cache = made()

    def loss(module: ma.FlaxAttention) -> jax.Array:
        return module(X, cache=cache.layer(0))[0].sum()

    return nnx.grad(loss)(attn())


def explicit() -> Any:
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Explicit,), devices=jax.devices()[:2])
    cache = empty(mesh=mesh)
    with jax.set_mesh(mesh):
        return call(cache)


def other_devices() -> Any:
    config = ma.AttentionConfig(ici_data_parallelism=1, ici_tensor_parallelism=2)
    elsewhere = config.make_mesh(jax.devices()[2:4])
    return call(empty(mesh=elsewhere), module={"mesh": mesh_of("tensor 2")})


def not_whole() -> ma.KVCache:
    return made(ENDLESS, frames=6)


def filled() -> ma.KVCache:
    """Make a cache in which every slot has a frame."""
    return attn()(X, cache=not_whole().layer(0))[1].advance()


def used_up() -> Any:
    cache = made()
    cache.k.delete()
    return call(cache)


def call_kept_on(context: str, **how: Any) -> Any:
    mesh = mesh_of("context 2")
    cache = empty(ma.Stream(4, 1), mesh=mesh, context=context, frames=1)
    return call(replace(cache, stage="full", mode="cached"), module={"mesh": mesh}, **how)


BAD: dict[str, Callable[[], Any]] = {
    # the stream
    "sink_leaves_no_room": lambda: ma.Stream(1560, 3, window=2, sink=4),
    "window_of_no_blocks": lambda: ma.Stream(1560, 3, window=0),
    "tokens_zero": lambda: ma.Stream(0),
    "teacher_mask_of_no_frames": lambda: STREAM.teacher_mask(0),
    "teacher_mask_shards": lambda: STREAM.teacher_mask(9, shards=2),
    "teacher_mask_too_many_shards": lambda: ma.Stream(1).teacher_mask(64, shards=16),
    "teacher_mask_length": lambda: STREAM.teacher_mask(6).bind(24, 24),
    "pair_of_two_shapes": lambda: STREAM.pair(X, X[:, :6]),
    "pair_shards": lambda: STREAM.pair(X, X, shards=5),
    "pair_of_lists": lambda: STREAM.pair([1, 2], [3, 4]),  # pyright: ignore
    "pair_axis": lambda: STREAM.pair(X, X, axis=3),
    "pair_of_numbers": lambda: STREAM.pair(jnp.float32(1), jnp.float32(2)),
    "unpair_a_list": lambda: STREAM.unpair([1, 2]),  # pyright: ignore
    "unpair_odd": lambda: STREAM.unpair(X[:, :5]),
    "unpair_shards": lambda: STREAM.unpair(X, shards=4),
    "unpair_no_shards": lambda: STREAM.unpair(X, shards=0),
    "blocks_not_whole": lambda: STREAM.blocks(7),
    "teacher_mask_not_whole": lambda: STREAM.teacher_mask(7),
    "sink_without_window": lambda: ma.Stream(4, 3, sink=2),
    "slot_below_zero": lambda: STREAM.slots(-1),
    "slots_below_zero": lambda: STREAM.slots(np.array([3, -1])),
    "slots_of_jax_below_zero": lambda: STREAM.slots(jnp.array([3, -1])),
    "slot_of_half_a_frame": lambda: STREAM.slots(1.5),  # pyright: ignore
    "slots_of_a_list": lambda: STREAM.slots([1, 2]),  # pyright: ignore
    # an empty cache
    "no_frames_without_window": lambda: empty(ENDLESS),
    "frames_beside_window": lambda: empty(frames=21),
    "frames_below_a_block": lambda: empty(ENDLESS, frames=2),
    "dtype": lambda: empty(dtype="int8"),
    "batch_zero": lambda: empty(batch=0),
    "positions": lambda: empty(positions="slot"),
    "context": lambda: empty(context="head"),
    "slots_with_a_sink": lambda: empty(ma.Stream(4, 3, 2, sink=3), positions="slots"),
    "heads_over_mesh": lambda: empty(mesh=mesh_of("context 4")),
    "tokens_over_mesh": lambda: empty(STREAM_6, mesh=mesh_of("context 4"), context="tokens"),
    "batch_over_mesh": lambda: empty(mesh=mesh_of("data 2, context 2, tensor 2"), kv_heads=4),
    "layer": lambda: empty().layer(2),
    # from block to block
    "unwritten_after_the_first_block": lambda: made().unwritten(),
    "unwritten_advanced": lambda: call(empty().unwritten())[1].advance(),
    "unwritten_extracted": lambda: empty(ENDLESS, frames=3).extract().unwritten(),
    "extracted_unwritten": lambda: empty(ENDLESS, frames=3).unwritten().extract(),
    "prefix_not_whole": lambda: empty().prefix(4),
    "prefix_later": lambda: made().prefix(3),
    "prefix_beyond_slots": lambda: empty(ENDLESS, frames=6).prefix(9),
    "advance_cached": lambda: made().cached().advance(),
    "no_slot_left": lambda: call(filled()),
    "advance_without_slot": lambda: filled().advance(),
    "frames_that_skip": lambda: made().advance(),
    "frames_that_skip_at_first": lambda: empty().advance(),
    "frames_that_skip_in_a_prefix": lambda: empty().prefix(6).advance(),
    "frames_that_skip_under_jit": lambda: jax.jit(lambda c: c.advance().advance())(made()),
    "frames_that_skip_after_jit": lambda: jax.jit(lambda c: call(c)[1].advance())(made()).advance(),
    "frames_that_skip_elsewhere": lambda: jax.device_put(made(), jax.devices()[0]).advance(),
    "frames_that_skip_stacked": lambda: ma.KVCache.stacked([made(), call(made())[1]]).advance(),
    "kept_before_no_frame": lambda: STREAM.kept(-3),
    "kept_before_half_a_frame": lambda: STREAM.kept(4.5),  # pyright: ignore
    "stacked_empty": lambda: ma.KVCache.stacked([made(), empty()]),
    "stacked_of_two_dtypes": lambda: ma.KVCache.stacked([made(), bfloat16_made()]),
    "stacked_nothing": lambda: ma.KVCache.stacked([]),
    "alone_in_words": lambda: ma.Stream(4, first_frame_alone="no"),  # type: ignore[arg-type]
    "stacked_of_two_streams": lambda: ma.KVCache.stacked([made(), made(ma.Stream(4, 3, 3))]),
    "refill_nothing": lambda: empty().refill(),
    "refill_under_jit": lambda: jax.jit(lambda c: c.refill())(made()),
    "refilled_without_refill": lambda: made().refilled(STREAM, 3),
    "refilled_too_early": lambda: refilling().refilled(STREAM, 3),
    "refilled_as_another_stream": lambda: rerun().refilled(ma.Stream(4, 3, 2, sink=1), 9),
    "refilled_by_no_stream": lambda: rerun().refilled(None, 9),  # pyright: ignore
    "refilled_at_another_frame": lambda: rerun().refilled(STREAM, 12),
    "refilled_within_a_block": lambda: rerun().refilled(
        ma.Stream(4, 3, 2, first_frame_alone=True), 9
    ),
    "refill_twice": lambda: rerun().refill(),
    "stacked_while_refilled": lambda: ma.KVCache.stacked([rerun(), made()]),
    "stacked_of_a_cache": lambda: ma.KVCache.stacked(made()),  # pyright: ignore
    "stacked_of_layers": lambda: ma.KVCache.stacked(x for x in (made(), X)),  # pyright: ignore
    "donated_advanced": lambda: donated().advance(),
    "donated_stacked": lambda: ma.KVCache.stacked([donated()]),
    "donated_refilled": lambda: donated().refill(),
    "layer_traced": lambda: jax.jit(empty(per_layer=True).layer)(jnp.int32(0)),
    "per_layer_number": lambda: empty(per_layer=1),
    "stacked_beside_one_array": lambda: ma.KVCache.stacked([made(per_layer=True), made()]),
    # what never changes
    "extract_later": lambda: made().extract(),
    "extract_start": lambda: empty().extract(-1),
    "extract_by_slots": lambda: empty(positions="slots").extract(),
    "extract_beyond_tokens": lambda: call(empty().extract(start=3)),
    "cached_empty": lambda: empty().cached(),
    "append_to_a_window": lambda: made().append(made()),
    "append_with_empty_slots": lambda: not_whole().append(not_whole()),
    "append_with_an_empty_slot_under_jit": lambda: jax.jit(lambda a, b: a.append(b))(
        made(ENDLESS, frames=4), made(ENDLESS, frames=3)
    ),
    "append_of_another_batch": lambda: made(ENDLESS, frames=3).append(
        call(empty(ENDLESS, frames=3, batch=2), jnp.zeros((2, 12, 16)))[1].advance()
    ),
    # a call
    "the_cache_itself": lambda: attn()(X, cache=empty()),  # pyright: ignore
    "mask_beside": lambda: call(empty(), mask=Causal()),
    "bias_beside": lambda: call(empty(), bias=jnp.zeros((1, 1, 12, 12))),
    "mask_of_empty_slots": lambda: call(made(ENDLESS, frames=6).cached(), mask=Causal()),
    "bias_of_kept": lambda: call(made(ENDLESS, frames=3).cached(), bias=jnp.zeros((1, 1, 12, 24))),
    "mask_over_tokens_of_devices": lambda: call_kept_on("tokens", mask=Causal()),
    "mask_with_arrays_on_a_mesh": lambda: call_kept_on("heads", mask=KeyPadding([5])),
    "rotary_of_keys_by_slots": lambda: call(
        empty(positions="slots"), rotary_emb=ma.rope_1d(8, 24), rotary_emb_k=ma.rope_1d(8, 12)
    ),
    "rotary_of_a_block_by_slots": lambda: call(
        empty(positions="slots"), rotary_emb=ma.rope_1d(8, 12)
    ),
    "rotary_of_rows_by_slots": lambda: call(
        empty(positions="slots"),
        rotary_emb=jax.tree.map(lambda a: jnp.asarray(a)[None], ma.rope_1d(8, 24)),
    ),
    "rotary_of_another_block": lambda: call(empty(), rotary_emb=ma.rope_1d(8, 24)),
    "another_mesh": lambda: call(empty(mesh=mesh_of("tensor 2"))),
    "a_mesh_of_other_devices": other_devices,
    "mesh_of_the_module_alone": lambda: call(empty(), module={"mesh": mesh_of("tensor 2")}),
    "another_batch": lambda: call(empty(batch=2)),
    "other_heads": lambda: call(empty(kv_heads=1)),
    "another_width": lambda: call(empty(dim_head=16)),
    "frames_of_other_rows": lambda: call(replace(made(), frame=jnp.array([3, 3]))),
    "another_dtype": lambda: call(empty(dtype="bfloat16")),
    "values_of_another_dtype": lambda: call(replace(empty(), v=empty(dtype="bfloat16").v)),
    "values_of_another_shape": lambda: call(replace(empty(), v=empty(dim_head=4).v)),
    "fewer_tokens_than_slots": lambda: call(
        replace(empty(), k=empty().k[:, :, :20], v=empty().v[:, :, :20])
    ),
    "used_up": used_up,
    "another_block_length": lambda: call(empty(), jnp.zeros((1, 24, 16))),
    "a_frame_instead_of_a_block": lambda: call(made(), X[:, :4]),
    "under_a_gradient": gradient,
    "explicit_axes": explicit,
    "cached_tokens_over_mesh": lambda: call_kept_on("tokens", x=X[:, :5]),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals_say_what_and_why_and_what_to_do(name: str) -> None:
    check_refused(f"streaming/{name}", MaxattnError, BAD[name])


@pytest.mark.parametrize("index", [-1, 2])
def test_a_traced_index_of_no_layer_gives_nan(index: int) -> None:
    """It cannot be refused, and jax would clamp it to the last layer."""
    cache = made()
    with pytest.raises(MaxattnError):
        cache.layer(index)
    for this in (cache, cache.cached()):
        run = jax.jit(lambda cache, i: attn()(X + 1, cache=cache.layer(i))[0])
        assert np.isnan(run(this, index)).all() and np.isfinite(run(this, 1)).all()


def test_rows_that_are_recomputed_are_nan_if_stacked_under_jit() -> None:
    cache = jax.jit(lambda *caches: ma.KVCache.stacked(caches))(rerun(), made())
    assert np.isnan(cache.k[:, 0]).all() and np.isnan(cache.v[:, 0]).all()
    assert np.isfinite(cache.k[:, 1]).all() and np.isfinite(cache.v[:, 1]).all()


def test_what_is_refused_changes_nothing() -> None:
    """Refusals come before any computation, so the cache is unchanged and may be donated."""
    cache = made()
    with pytest.raises(MaxattnError):
        jax.jit(lambda x, c: attn()(x, cache=c.layer(0)), donate_argnums=1)(X[:, :4], cache)
    assert not cache.k.is_deleted()
    call(cache)


def test_one_program_passes_over_caches_that_are_written_and_not() -> None:
    """A pass in a scan changes whether the cache is written, which is not part of jit's key."""

    @jax.jit
    def passes(cache: ma.KVCache) -> ma.KVCache:
        return jax.lax.scan(lambda c, _: (call(c)[1], None), cache, length=2)[0]

    cache = call(made())[1].advance()
    written = passes(passes(cache))
    assert programs(passes) == 1
    assert int(jax.tree.map(jnp.copy, written).advance().frame) == 9


def test_frames_beyond_the_slots_of_a_traced_cache_are_nan() -> None:
    """Under jit a frame number cannot be refused; a block whose last frame has no slot is NaN."""
    cache = made(ENDLESS, frames=8)

    @jax.jit
    def two_blocks(cache: ma.KVCache) -> Any:
        _, cache = call(cache)
        return call(cache.advance())

    assert bool(jnp.isnan(two_blocks(cache)[0]).all())


def test_a_gradient_beside_a_cache_is_taken() -> None:
    """Computations after a rollout can be differentiated if its parameters are constants."""
    cache, module = made(), attn()

    def loss(scale: jax.Array) -> jax.Array:
        return (scale * module(X + 1, cache=cache.layer(0))[0]).sum()

    assert bool(jnp.isfinite(jax.grad(loss)(jnp.float32(2.0))))


@pytest.mark.parametrize("index", [2, -1, np.int64(5), jnp.int32(2), 0.9, "1", True, None, X])
def test_a_layer_that_is_none_is_refused(index: Any) -> None:
    """For any kind of integer: jax would clamp a write beyond the last layer to it."""
    with pytest.raises(MaxattnError, match="layer"):
        empty().layer(index)


def test_caches_that_still_fill_are_not_appended_under_jit() -> None:
    half, whole = made(ENDLESS, frames=6), made(ENDLESS, frames=3)
    join = jax.jit(lambda a, b: a.append(b))
    with pytest.raises(MaxattnError, match="slots must be filled"):
        join(half, half)
    assert join(whole, whole).frame == 6
