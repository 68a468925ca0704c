"""Layers that are stacked along an axis, run one after the other and compiled once.

A model may be closed over by what jax traces (`jax.jit`, the `lax.scan` of a sampler). nnx's own
scan refuses that, since it writes back into the layers; these layers only read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

Layer = TypeVar("Layer", bound=nnx.Module)


def stacked(make: Callable[[nnx.Rngs], Layer], count: int, rngs: nnx.Rngs) -> Layer:
    """Make layers as one module, whose parameters have a leading axis of layers.

    Args:
        make: of one layer, its source of parameters.
        count: how many.
        rngs: source of the initial parameters.
    """
    keys = jax.random.split(rngs.params(), count)
    # The layer axis comes before the axes that a parameter's own metadata name.
    how: dict[str, Any] = {"transform_metadata": {nnx.PARTITION_NAME: None}}
    return nnx.vmap(lambda key: make(nnx.Rngs(key)), **how)(keys)


def run_layers(run: Callable[[Layer, Any, Any], Any], layers: Layer, x: Any, each: Any) -> Any:
    """Run stacked layers in their order.

    Args:
        run: of one layer, what the layer before it gave, and its own part of `each`.
        layers: one module whose parameters have a leading axis of layers.
        x: what the first layer takes.
        each: arrays with a leading axis of layers, as a pytree; None is nothing.

    Returns:
        What the last layer gives.
    """
    graph, states = nnx.split(layers)

    def step(x: Any, own: tuple[Any, Any]) -> tuple[Any, None]:
        return run(nnx.merge(graph, own[0]), x, own[1]), None

    return jax.lax.scan(step, x, (states, each))[0]


def map_layers(run: Callable[[Layer], Any], layers: Layer) -> Any:
    """Call a function on each of stacked layers; its results get a leading axis of layers."""
    graph, states = nnx.split(layers)
    return jax.lax.map(lambda own: run(nnx.merge(graph, own)), states)


def recomputed(run: Callable[..., Any], layer: nnx.Module, *arrays: Any) -> Any:
    """Call `run(layer, *arrays)`, of which the backward keeps only what goes in."""
    graph, state = nnx.split(layer)

    @jax.checkpoint
    def call(state: Any, *arrays: Any) -> Any:
        return run(nnx.merge(graph, state), *arrays)

    return call(state, *arrays)
