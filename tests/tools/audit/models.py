"""Models to audit: a stack of layers, run in several ways, and the same with planted faults."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import maxattn as ma
from maxattn.kernels import DotProduct
from maxattn.kernels.base import Result

LAYERS, HEADS, DIM, GRID = 4, 4, 16, (2, 8, 12)
WIDTH, TOKENS = HEADS * DIM, 2 * 8 * 12
OFFSET_LAYER, OFFSET_HEAD = 1, 3
DOMINANT_LAYER, DOMINANT_HEAD = 2, 1
LARGE_LAYER = 3


class Block(nnx.Module):
    """One layer of self-attention, with a bias in its projections."""

    def __init__(self, rngs: nnx.Rngs, config: Any = None) -> None:
        sizes: dict[str, Any] = {"heads": HEADS, "dim_head": DIM, "bias": True}
        self.attn = ma.FlaxAttention(WIDTH, **sizes, config=config, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, angles: Any) -> jax.Array:
        return x + 0.1 * self.attn(self.norm(x), angles)


class Stack(nnx.Module):
    """Layers stacked by `nnx.vmap`; `runs` says how they run."""

    def __init__(self, runs: str = "nnx.scan", config: Any = None) -> None:
        stack = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: Block(rngs, config)))
        self.blocks, self.runs = stack(nnx.Rngs(0)), runs

    def __call__(self, x: jax.Array, angles: Any) -> jax.Array:
        return RUNS[self.runs](self.blocks, x, angles)


def by_nnx_scan(blocks: Block, x: jax.Array, angles: Any) -> jax.Array:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def run(x: jax.Array, block: Block) -> jax.Array:
        return ma.remat(Block.__call__, ma.AttentionConfig())(block, x, angles)

    return nnx.jit(run)(x, blocks)


def by_lax_scan(blocks: Block, x: jax.Array, angles: Any) -> jax.Array:
    graph, state = nnx.split(blocks)

    def step(x: jax.Array, state: Any) -> Any:
        return nnx.merge(graph, state)(x, angles), None

    return jax.lax.scan(step, x, state)[0]


def by_loop(blocks: Block, x: jax.Array, angles: Any) -> jax.Array:
    graph, state = nnx.split(blocks)
    for i in range(LAYERS):
        x = nnx.merge(graph, jax.tree.map(lambda leaf, i=i: leaf[i], state))(x, angles)
    return x


RUNS: dict[str, Any] = {"nnx.scan": by_nnx_scan, "lax.scan": by_lax_scan, "loop": by_loop}


def states(batch: int = 2) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (batch, TOKENS, WIDTH))


def angles() -> ma.Rotary:
    return ma.rope_3d(DIM, *GRID, style="half")


def faulty() -> Stack:
    """Plant a K offset of 10 sigma in one head, a dominant head, and a layer of huge norms.

    The last pair of the table turns slowest: 2 and 10 are pairs of the half style, 10 is of width.
    """
    model = Stack()
    attn = model.blocks.attn
    of_bias: Any = attn.to_k.bias
    keys, bias, queries = (
        np.array(x.get_value()) for x in (attn.to_k.kernel, of_bias, attn.to_q.kernel)
    )
    bias[OFFSET_LAYER, OFFSET_HEAD * DIM + 2] = 10.0
    queries[DOMINANT_LAYER, :, DOMINANT_HEAD * DIM : (DOMINANT_HEAD + 1) * DIM] *= 30
    keys[LARGE_LAYER] *= 60
    attn.to_k.kernel.set_value(jnp.asarray(keys))
    of_bias.set_value(jnp.asarray(bias))
    attn.to_q.kernel.set_value(jnp.asarray(queries))
    return model


def with_bad_value(bad: float) -> Stack:
    """Put a value into the bias of V: of layer 2, head 1."""
    model = Stack()
    bias: Any = model.blocks.attn.to_v.bias
    bias.set_value(bias.get_value().at[2, DIM + 3].set(bad))
    return model


class Rough(DotProduct):
    """A kernel that is wrong by a quarter."""

    name: ClassVar[str] = "rough"

    @staticmethod
    def build(call: Any, config: Any, target: Any) -> Rough:
        return Rough(call.scale)

    def forward(self, inputs: Any) -> Result:
        out, lse = super().forward(inputs)
        return Result(1.25 * out, lse)


def for_command(config: ma.AttentionConfig) -> Any:
    """Return (model, inputs) for `maxattn audit --call`."""
    return Stack(config=config), (states(), angles())


def without_config() -> Any:
    return Stack(), {"x": states(), "angles": angles()}


def wrong() -> int:
    return 3
