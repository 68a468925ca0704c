"""A rollout on an NVIDIA GPU: FlashAttention-4 over the cache, and programs that do not copy it.

Results with the cache and under the teacher-forcing mask are compared with float32.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.rope import Rotary
from tests.gpu.requirements import skip_unless_available

pytestmark = pytest.mark.gpu

WIDTH, HEADS, DIM_HEAD, LAYERS = 256, 2, 128, 3
STREAM = ma.Stream(160, 3, 3, sink=2)
FRAMES = 18


class Net:
    """Layers of self-attention, in a scan."""

    def __init__(self, dtype: Any, kernel: Any) -> None:
        config = ma.AttentionConfig(attention=kernel)
        how = {"qk_norm": "rms_norm", "config": config, "dtype": dtype, "param_dtype": dtype}
        layers = [
            ma.FlaxAttention(WIDTH, HEADS, dim_head=DIM_HEAD, rngs=nnx.Rngs(i), **how)
            for i in range(LAYERS)
        ]
        self.graph = nnx.split(layers[0])[0]
        self.state = jax.tree.map(lambda *x: jnp.stack(x), *map(nnx.state, layers))

    def forward(self, state: Any, x: jax.Array, turn: Rotary, mask: Any) -> jax.Array:
        def layer(x: jax.Array, state: Any) -> Any:
            return x + nnx.merge(self.graph, state)(x, rotary_emb=turn, mask=mask), None

        return jax.lax.scan(layer, x, state)[0]

    def step(self, state: Any, x: jax.Array, turn: Rotary, cache: ma.KVCache) -> Any:
        def layer(carry: Any, at: Any) -> Any:
            (x, cache), (index, state) = carry, at
            attn = nnx.merge(self.graph, state)
            y, cache = attn(x, rotary_emb=turn, cache=cache.layer(index))
            return (x + y, cache), None

        return jax.lax.scan(layer, (x, cache), (jnp.arange(LAYERS), state))[0]


def empty(**how: Any) -> ma.KVCache:
    sizes = {"layers": LAYERS, "batch": 1, "kv_heads": HEADS, "dim_head": DIM_HEAD}
    return STREAM.cache(**sizes, **how)


def clips() -> tuple[jax.Array, jax.Array]:
    shape = (2, 1, FRAMES * STREAM.tokens_per_frame, WIDTH)
    clean, noisy = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    return clean, noisy


@pytest.mark.parametrize("kernel", ["flash", "auto"])
def test_a_rollout_in_bfloat16_is_teacher_forcing_in_float32(kernel: str) -> None:
    skip_unless_available("flash")
    net, exact = Net(jnp.bfloat16, kernel), Net(jnp.float32, "dot_product")
    (clean, noisy), turn = clips(), ma.rope_1d(DIM_HEAD, FRAMES * STREAM.tokens_per_frame)
    step, cache, outs = jax.jit(net.step, donate_argnums=3), empty(), []
    for start, stop in STREAM.blocks(FRAMES):
        own = slice(start * STREAM.tokens_per_frame, stop * STREAM.tokens_per_frame)
        at = Rotary(turn.cos[own], turn.sin[own])
        y_noisy, cache = step(net.state, noisy[:, own], at, cache)
        y_clean, cache = step(net.state, clean[:, own], at, cache)
        cache = cache.advance()
        outs.append((y_clean, y_noisy))
    got = [jnp.concatenate(y, axis=1) for y in zip(*outs, strict=True)]
    state = jax.tree.map(lambda x: x.astype(jnp.float32), net.state)
    twice = Rotary(*(np.concatenate([x, x]) for x in (turn.cos, turn.sin)))
    both = STREAM.pair(clean, noisy).astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        forward = jax.jit(exact.forward, static_argnums=3)
        want = STREAM.unpair(forward(state, both, twice, STREAM.teacher_mask(FRAMES)))
    for g, w in zip(got, want, strict=True):
        assert float(jnp.abs(g - w).max()) < 0.03 * float(jnp.abs(w).max())


@pytest.mark.parametrize("stage", ["filling", "full"])
def test_no_program_copies_the_cache(stage: str) -> None:
    skip_unless_available("flash")
    net, cache = Net(jnp.bfloat16, "flash"), empty()
    while cache.stage != stage:
        cache = replace(cache).advance()  # as if a pass had written to it
    x = jnp.zeros((1, cache.tokens, WIDTH), jnp.bfloat16)
    turn = ma.rope_1d(DIM_HEAD, cache.tokens)
    step = jax.jit(net.step, donate_argnums=3).lower(net.state, x, turn, cache).compile()
    shape = ",".join(map(str, cache.k.shape))
    assert not re.findall(rf"= bf16\[{shape}\]\S* copy(?:-start)?\(", step.as_text() or "")
    memory: Any = step.memory_analysis()
    assert memory.alias_size_in_bytes >= cache.nbytes
