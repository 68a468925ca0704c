"""A cache with arrays of each layer: what it keeps is what one array of all layers keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import MaxattnError
from tests.golden_text import check_golden
from tests.streaming.stack import LAYERS, Stack, clips, close, rollout, skipped, table
from tests.streaming.test_programs import copies
from tests.waiting import but

STREAM = ma.Stream(2, 3, 3, sink=2)
STREAMS = {
    "sink": STREAM,
    "no_sink": ma.Stream(2, 3, 2),
    "alone": ma.Stream(2, 3, 4, sink=1, first_frame_alone=True),
}


class Apart(Stack):
    """Run the layers one after the other, each with its own part of the cache."""

    def step(
        self, x: jax.Array, times: Any, rotary: Any, cache: ma.KVCache, mask: Any = None
    ) -> Any:
        for index in range(LAYERS):
            state = jax.tree.map(lambda a, i=index: a[i], self.state)
            how = {"rotary_emb": rotary, "cache": cache.layer(index), "mask": mask}
            x, cache = nnx.merge(self.graph, state)(x, times, **how)
        return x, cache


APART = Apart(*Stack.make())


def joined(cache: ma.KVCache) -> tuple[jax.Array, jax.Array]:
    return jnp.concatenate(list(cache.k)), jnp.concatenate(list(cache.v))


@pytest.mark.parametrize("name", STREAMS)
def test_a_rollout_is_that_of_one_array(name: str) -> None:
    stream, (clean, noisy) = STREAMS[name], clips(STREAMS[name], 13 if name == "alone" else 12)
    want = rollout(Stack.make(), stream, APART.cache(stream), clean, noisy)
    got = rollout(APART, stream, APART.cache(stream, per_layer=True), clean, noisy)
    close(got.clean, want.clean)
    close(got.noisy, want.noisy)
    for mine, theirs in zip(joined(got.cache), (want.cache.k, want.cache.v), strict=True):
        close(mine, theirs)
    assert got.programs <= 3 and repr(got.cache) == repr(want.cache)
    assert got.cache.nbytes == want.cache.nbytes and got.cache.shape == want.cache.shape


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("stage", ["empty", "filling", "full"])
def test_no_program_copies_a_layer(stage: str, rows: bool) -> None:
    if stage == "empty" and rows:
        pytest.skip("rows go on together after their first block")
    cache = APART.cache(STREAM, batch=2, per_layer=True)
    while cache.stage != stage:
        cache = skipped(cache)
    if rows:
        cache = ma.KVCache.stacked([cache, cache])
    clean, _ = clips(STREAM, 3, batch=cache.shape[1])
    step = jax.jit(APART.step, donate_argnums=3)
    program = step.lower(clean, 0.0, table(STREAM, 3), cache).compile()
    # A CPU's attention copies what it transposes; none of that has the cache's axes.
    form = f"= f32[{','.join(map(str, cache.k[0].shape))}]"
    assert not [line for line in copies(program.as_text(), cache.k[0].size) if form in line]
    memory: Any = program.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes


def test_rows_prompts_and_prefixes_go_the_same_way() -> None:
    stream, (clean, noisy) = STREAM, clips(STREAM, 12)
    made = [
        rollout(stack, stream, stack.cache(stream, per_layer=stack is APART), clean, noisy).cache
        for stack in (Stack.make(), APART)
    ]
    rows = [ma.KVCache.stacked([cache, cache]) for cache in made]
    close(joined(rows[1])[0], rows[0].k)
    again = []
    for cache in made:
        at = int(cache.frame)
        anew = cache.refill()
        anew = replace(anew, frame=jnp.int32(len(stream.kept(at))))
        again.append(anew.refilled(stream, at))
    close(joined(again[1])[0], again[0].k)
    endless = ma.Stream(2, 3)
    kept = [
        rollout(stack, endless, stack.cache(endless, frames=3, per_layer=stack is APART),
                clean[:, :6], noisy[:, :6]).cache
        for stack in (Stack.make(), APART)
    ]  # fmt: skip
    close(joined(kept[1].append(kept[1]))[1], kept[0].append(kept[0]).v)


@pytest.mark.parametrize("context", but(["heads", "tokens"], ["heads"]))
def test_on_a_mesh_each_layer_lies_as_the_whole_does(context: str) -> None:
    config = ma.AttentionConfig(ici_context_parallelism=2, ici_tensor_parallelism=2)
    mesh = config.make_mesh(jax.devices()[:4])
    how = {"mesh": mesh, "context": context}
    whole, apart = (APART.cache(STREAM, per_layer=per, **how) for per in (False, True))
    shard = whole.k.sharding.shard_shape(whole.k.shape)
    for array in (*apart.k, *apart.v):
        assert array.sharding.shard_shape(array.shape) == (1, *shard[1:])
    stack = Stack.make(config=config, mesh=mesh)
    clean, noisy = clips(STREAM, 9)
    want = rollout(stack, STREAM, whole, clean, noisy)
    close(rollout(Apart(*stack), STREAM, apart, clean, noisy).noisy, want.noisy)


BAD = {
    "traced": lambda: jax.jit(APART.cache(STREAM, per_layer=True).layer)(jnp.int32(0)),
    "number": lambda: APART.cache(STREAM, per_layer=1),
    "beside_one_array": lambda: ma.KVCache.stacked(
        [skipped(APART.cache(STREAM, per_layer=per)) for per in (True, False)]
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_refused(name: str) -> None:
    with pytest.raises(MaxattnError) as caught:
        BAD[name]()
    check_golden(f"per_layer/{name}", str(caught.value))


def test_what_is_not_donated_stays() -> None:
    cache, (clean, _) = APART.cache(STREAM, per_layer=True), clips(STREAM, 3)
    _, after = jax.jit(APART.step)(clean, 0.0, table(STREAM, 3), cache)
    assert not any(np.asarray(x).any() for x in cache.k) and all(bool(x.any()) for x in after.k)
