"""Layers of a model that follow one another: scanned, or each on its own.

Scanned layers are stacked along an axis: they compile once, however many there are, and each reads
its weights as a slice. A list of layers compiles each of them, and no weight is a slice: a GPU
copies none before it multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

import maxattn as ma
from maxattn.steps import are_stacked

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


def scan_here(said: bool | None) -> bool:
    """Check whether sampling scans layers: unless it runs on a GPU, or a setting decides.

    Args:
        said: `model.scan_layers`.
    """
    return ma.Target.here().platform != "gpu" if said is None else said


def map_layers(run: Callable[[Any], Any], layers: Any) -> Any:
    """Call a function on each layer.

    Returns:
        Its results: with a leading axis of layers where they are scanned, else a tuple of them.
    """
    if not are_stacked(layers):
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
