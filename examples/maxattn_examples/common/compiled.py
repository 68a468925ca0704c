"""Arguments of compiled programs: a model as a tuple of arrays; and XLA's options.

jax flattens a tuple in C++, but an nnx state in Python: for a thousand arrays that takes
milliseconds before every call, in which a GPU may be idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

import maxattn as ma
from maxattn.tools.xla_options import refusal, xla_options

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
