"""Layers of a model that follow one another: scanned, or each on its own.

Scanned layers are stacked along an axis: they compile once, however many there are, and each reads
its weights as a slice. A list of layers compiles each of them, and no weight is a slice: a GPU
copies none before it multiplies.

A model may be closed over by what jax traces (`jax.jit`, the `lax.scan` of a sampler). nnx's own
scan refuses that, since it writes back into the layers; these layers only read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
from flax import nnx

import maxattn as ma

Layer = TypeVar("Layer", bound=nnx.Module)


class Layers(NamedTuple):
    """The layers of a model's call, for a function that decides which of them run.

    Args:
        count: how many.
        run: runs the layers of a range on what the layer before it gave.
        add: whether layers add to what they take, so that what they added can be reused; else what
            they give can.
        beside: arrays that every layer takes beside it, such as the embedding of the time.
    """

    count: int
    run: Callable[[Any, range], Any]
    add: bool = True
    beside: Any = ()

    def all(self, x: Any) -> Any:
        """Run every layer."""
        return self.run(x, range(self.count))


# Stands around the layers of a call: from them and what the first one takes to what the last gives.
Around = Callable[[Layers, Any], Any]


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


def count_layers(layers: Any) -> int:
    """Return how many layers `make_layers` made."""
    return len(jax.tree.leaves(nnx.state(layers))[0]) if are_scanned(layers) else len(layers)


def run_layers(
    run: Callable[[Any, Any, Any, Any], Any],
    layers: Any,
    x: Any,
    each: Any,
    span: range | None = None,
) -> Any:
    """Run layers in their order.

    Args:
        run: of one layer, what the layer before it gave, its own part of `each` and its number,
            which is traced in a scan.
        layers: from `make_layers`.
        x: what the first layer takes.
        each: from `map_layers`, or None.
        span: numbers of the layers that run; default all.

    Returns:
        What the last layer gives.
    """
    span = range(count_layers(layers)) if span is None else span
    if not are_scanned(layers):
        for number in span:
            # Put together anew, since it may run in a branch of a `lax.cond`, another trace.
            graph, state = nnx.split(layers[number])
            layer = nnx.merge(graph, jax.tree.map(lambda x: x, state))
            x = run(layer, x, None if each is None else each[number], number)
        return x
    graph, states = nnx.split(layers)
    numbers = jax.numpy.arange(span.start, span.stop)

    def step(x: Any, own: tuple[Any, Any, Any]) -> tuple[Any, None]:
        state, part, number = own
        return run(nnx.merge(graph, state), x, part, number), None

    def part_of(x: Any, number: Any) -> tuple[Any, None]:
        # Sliced where it is read: a slice of all would be a copy of the weights.
        at = partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
        return step(x, (*jax.tree.map(at, (states, each)), number))

    if len(span) < count_layers(layers):
        return jax.lax.scan(part_of, x, numbers)[0]
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
