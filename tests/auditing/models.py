"""Models to audit: a stack of layers, run in several ways, and one with planted faults."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
from flax import nnx

import maxattn as ma
from maxattn.kernels.base import Result
from maxattn.kernels.dot_product import DotProduct

LAYERS, HEADS, DIM, GRID = 4, 4, 16, (2, 8, 12)
WIDTH, TOKENS = HEADS * DIM, 2 * 8 * 12


class Block(nnx.Module):
    """One layer of self-attention, with a bias in its projections."""

    def __init__(self, rngs: nnx.Rngs, config: Any = None) -> None:
        sizes: dict[str, Any] = {"heads": HEADS, "dim_head": DIM, "bias": True}
        self.attn = ma.FlaxAttention(WIDTH, **sizes, config=config, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, angles: Any) -> jax.Array:
        return x + 0.1 * self.attn(self.norm(x), angles)


class Stack(nnx.Module):
    """Layers stacked by `nnx.vmap`; `runs` chooses how to run them."""

    def __init__(self, runs: str = "nnx.scan", config: Any = None) -> None:
        stack = nnx.split_rngs(splits=LAYERS)(nnx.vmap(lambda rngs: Block(rngs, config)))
        self.blocks, self.runs = stack(nnx.Rngs(0)), runs

    def __call__(self, x: jax.Array, angles: Any) -> jax.Array:
        return RUNS[self.runs](self.blocks, x, angles)


def by_nnx_scan(blocks: Block, x: jax.Array, angles: Any) -> jax.Array:
    block = ma.remat(Block.__call__, ma.AttentionConfig())
    run = nnx.scan(lambda x, own: block(own, x, angles), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    return nnx.jit(run)(x, blocks)


def by_lax_scan(blocks: Block, x: jax.Array, angles: Any) -> jax.Array:
    graph, state = nnx.split(blocks)
    return jax.lax.scan(lambda x, own: (nnx.merge(graph, own)(x, angles), None), x, state)[0]


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
    """Plant an offset of K in layer 1, head 3; a dominant head 1 in layer 2; huge keys in layer 3.

    The offset, of 10 sigma, is in channels (2, 10), a pair of the half style with a low frequency.
    """
    model = Stack()
    of: Any = model.blocks.attn
    head = slice(DIM, 2 * DIM)
    of.to_k.bias.set_value(of.to_k.bias.get_value().at[1, 3 * DIM + 2].set(10.0))
    of.to_q.kernel.set_value(of.to_q.kernel.get_value().at[2, :, head].multiply(30))
    of.to_k.kernel.set_value(of.to_k.kernel.get_value().at[3].multiply(60))
    return model


def with_bad_value(bad: float) -> Stack:
    """Put a value into the bias of V in layer 2, head 1."""
    model = Stack()
    bias: Any = model.blocks.attn.to_v.bias
    bias.set_value(bias.get_value().at[2, DIM + 3].set(bad))
    return model


class Rough(DotProduct):
    """A kernel whose result is wrong by a quarter."""

    name: ClassVar[str] = "rough"

    @staticmethod
    def build(call: Any, config: Any, target: Any) -> Rough:
        return Rough(call.scale)

    def forward(self, inputs: Any) -> Result:
        if inputs.q.dtype == "float16":
            raise NotImplementedError("no float16 here")
        out, lse = super().forward(inputs)
        return Result(1.25 * out, lse)


def for_command(config: ma.AttentionConfig) -> Any:
    """Return (model, inputs) for `maxattn audit --call`."""
    return Stack(config=config), (states(), angles())


def without_config() -> Any:
    return Stack(), {"x": states(), "angles": angles()}


def wrong() -> int:
    return 3
