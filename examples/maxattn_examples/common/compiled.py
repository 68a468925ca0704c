"""Compiled programs: layers as a scan or a list, a model as a tuple of arrays, XLA's options.

Scanned layers compile once, however many there are, and each reads a slice of the stacked weights.
A list compiles every layer, but needs no slices, which a GPU would copy before each matmul.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from flax import nnx

import maxattn as ma
from maxattn.steps import are_stacked
from maxattn.tools.xla_options import refusal, xla_options

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


# jax flattens a tuple in C++, but an nnx state in Python: for a thousand arrays that takes
# milliseconds before every call, in which a GPU may be idle.
Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Structure:
    """A model without its arrays; models of equal structures share compiled programs."""

    graph: nnx.GraphDef[Any]
    tree: Any

    def merge(self, leaves: Sequence[Any]) -> Any:
        """Return the model with these arrays, in the order that `split` returns."""
        return nnx.merge(self.graph, self.tree.unflatten(leaves))


def split(model: nnx.Module) -> tuple[Structure, Leaves]:
    """Return a model's structure and its arrays, or their shapes if it is abstract."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return Structure(graph, tree), tuple(leaves)


# XLA for GPUs joins products that share an input, and copies their weights together in every step.
# XLA's Triton matmuls leave a gelu to a separate pass; cuBLAS's matmuls include it.
FOR_SAMPLING = {"gpu": {"xla_gpu_dot_merger_threshold_mb": 0, "xla_gpu_enable_triton_gemm": False}}


def sampling_options(words: Iterable[str], setting: str = "--option") -> dict[str, Any]:
    """Return XLA's options for sampling: defaults for this platform, which the user's override.

    Raises:
        ConfigError: as `xla_options` does.
    """
    usual = FOR_SAMPLING.get(ma.Target.here().platform, {})
    known = {name: value for name, value in usual.items() if not refusal(name, value)}
    return known | xla_options(words, setting)
