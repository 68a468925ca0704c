"""Layers of a model that follow one another: scanned, or each on its own.

Scanned layers are stacked along an axis: they compile once, however many there are, and each reads
its weights as a slice. A list of layers compiles each of them, and no weight is a slice: a GPU
copies none before it multiplies.

A model may be closed over by what jax traces (`jax.jit`, the `lax.scan` of a sampler). nnx's own
scan refuses that, since it writes back into the layers; these layers only read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

import maxattn as ma

Layer = TypeVar("Layer", bound=nnx.Module)


def make_layers(
    make: Callable[[nnx.Rngs], Layer], count: int, rngs: nnx.Rngs, scan: bool = True
) -> Any:
    """Make layers, whose initial parameters are the same either way.

    Args:
        make: of one layer, its source of parameters.
        count: how many.
        rngs: source of the initial parameters.
        scan: True: one module, whose parameters have a leading axis of layers. False: a list.
    """
    keys = jax.random.split(rngs.params(), count)
    if not scan:
        return nnx.List([make(nnx.Rngs(key)) for key in keys])
    # The layer axis comes before the axes that a parameter's own metadata name.
    how: dict[str, Any] = {"transform_metadata": {nnx.PARTITION_NAME: None}}
    return nnx.vmap(lambda key: make(nnx.Rngs(key)), **how)(keys)


def are_scanned(layers: Any) -> bool:
    """Check whether layers are one module, as `make_layers` makes scanned ones."""
    return not isinstance(layers, nnx.List)


def scan_here(said: bool | None) -> bool:
    """Check whether sampling scans layers: unless it runs on a GPU, or a setting decides.

    Args:
        said: `model.scan_layers`.
    """
    return ma.Target.here().platform != "gpu" if said is None else said


def run_layers(run: Callable[[Any, Any, Any, Any], Any], layers: Any, x: Any, each: Any) -> Any:
    """Run layers in their order.

    Args:
        run: of one layer, what the layer before it gave, its own part of `each` and its number,
            which is traced in a scan.
        layers: from `make_layers`.
        x: what the first layer takes.
        each: from `map_layers`, or None.

    Returns:
        What the last layer gives.
    """
    if not are_scanned(layers):
        for number, layer in enumerate(layers):
            x = run(layer, x, None if each is None else each[number], number)
        return x
    graph, states = nnx.split(layers)

    def step(x: Any, own: tuple[Any, Any, Any]) -> tuple[Any, None]:
        state, part, number = own
        return run(nnx.merge(graph, state), x, part, number), None

    numbers = jax.numpy.arange(len(jax.tree.leaves(states)[0]))
    return jax.lax.scan(step, x, (states, each, numbers))[0]


def map_layers(run: Callable[[Any], Any], layers: Any) -> Any:
    """Call a function on each layer.

    Returns:
        Its results: with a leading axis of layers where they are scanned, else a tuple of them.
    """
    if not are_scanned(layers):
        return tuple(run(layer) for layer in layers)
    graph, states = nnx.split(layers)
    return jax.lax.map(lambda own: run(nnx.merge(graph, own)), states)


def recomputed(run: Callable[..., Any], layer: nnx.Module, *arrays: Any) -> Any:
    """Call `run(layer, *arrays)`, of which the backward keeps only what goes in."""
    graph, state = nnx.split(layer)

    @jax.checkpoint
    def call(state: Any, *arrays: Any) -> Any:
        return run(nnx.merge(graph, state), *arrays)

    return call(state, *arrays)
