"""The layers of a model: scanned over stacked parameters, or a list.

Scanned layers compile once, however many there are, and each reads a slice of the stacked weights.
A list compiles every layer, but needs no slices, which a GPU would copy before each matmul.
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
    """Make layers; their initial parameters do not depend on `scan`.

    Args:
        make: makes one layer from its random keys.
        scan: True: one module, whose parameters have a leading axis of layers. False: a list.
    """
    keys = jax.random.split(rngs.params(), count)
    if not scan:
        return nnx.List([make(nnx.Rngs(key)) for key in keys])
    # The layer axis comes before the axes that a parameter's own metadata name.
    how: dict[str, Any] = {"transform_metadata": {nnx.PARTITION_NAME: None}}
    return nnx.vmap(lambda key: make(nnx.Rngs(key)), **how)(keys)


def scan_here(said: bool | None) -> bool:
    """Decide whether sampling scans layers; by default not on GPUs.

    Args:
        said: `model.scan_layers`, which takes precedence unless it is None.
    """
    return ma.Target.here().platform != "gpu" if said is None else said


def map_layers(run: Callable[[Any], Any], layers: Any) -> Any:
    """Call a function on each layer.

    Returns:
        The results, stacked along a leading axis if layers are scanned, else a tuple.
    """
    if not are_stacked(layers):
        return tuple(run(layer) for layer in layers)
    graph, states = nnx.split(layers)
    return jax.lax.map(lambda own: run(nnx.merge(graph, own)), states)


def recomputed(run: Callable[..., Any], layer: nnx.Module, *arrays: Any) -> Any:
    """Call `run(layer, *arrays)`; save only its inputs, and recompute the rest in the backward."""
    graph, state = nnx.split(layer)

    @jax.checkpoint
    def call(state: Any, *arrays: Any) -> Any:
        return run(nnx.merge(graph, state), *arrays)

    return call(state, *arrays)
