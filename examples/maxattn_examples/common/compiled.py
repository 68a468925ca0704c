"""What a compiled program takes: a model as a tuple of arrays, and XLA's options.

jax takes a tuple apart in C++. The states of nnx it takes apart in Python: of a model with a
thousand arrays that is milliseconds before every call, in which a GPU may have nothing to do.
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
    """All of a model but its arrays; models of equal structures share compiled programs."""

    graph: nnx.GraphDef[Any]
    tree: Any

    def merge(self, leaves: Sequence[Any]) -> Any:
        """Return a model of these arrays, which are in the order of `split`."""
        return nnx.merge(self.graph, self.tree.unflatten(leaves))


def split(model: nnx.Module) -> tuple[Structure, Leaves]:
    """Return a model's structure and its arrays, or their shapes where it has no more."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)
    return Structure(graph, tree), tuple(leaves)


# XLA for GPUs joins products that share an input, and copies their weights together in every step.
# Behind a product that it writes in Triton a gelu is a pass of its own; cuBLAS's product takes it.
FOR_SAMPLING = {"gpu": {"xla_gpu_dot_merger_threshold_mb": 0, "xla_gpu_enable_triton_gemm": False}}


def sampling_options(words: Iterable[str], setting: str = "--option") -> dict[str, Any]:
    """Read XLA's options for a program that samples: the user's, after those that help it here.

    Raises:
        ConfigError: as `xla_options` does.
    """
    usual = FOR_SAMPLING.get(ma.Target.here().platform, {})
    known = {name: value for name, value in usual.items() if not refusal(name, value)}
    return known | xla_options(words, setting)
