"""Tokens and a layer's output that the next norm adds to them, in one pass over memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

import maxattn as ma
from maxattn.modules import GatedBranch, ModulationRow, adaptive_norm, gated_sum
from maxattn.steps import are_stacked

Tokens = Float[Array, "B T D"]


class Residual(NamedTuple):
    """Tokens, and a layer's output that is not yet added to them."""

    x: Tokens
    branch: GatedBranch | None = None

    @property
    def total(self) -> Tokens:
        """Return the tokens with the branch added."""
        return self.x if self.branch is None else gated_sum(self.x, self.branch)

    def normed(
        self,
        norm: nnx.LayerNorm,
        scale: ModulationRow | None = None,
        shift: ModulationRow | None = None,
        mesh: Any = None,
    ) -> tuple[Tokens, Tokens]:
        """Return the total, and the total after a norm; arguments as for `adaptive_norm`."""
        return adaptive_norm(self.x, norm, scale, shift, branch=self.branch, mesh=mesh)


def residual(x: Tokens | Residual) -> Residual:
    """Wrap tokens in a `Residual` without a branch; return a `Residual` unchanged."""
    return x if isinstance(x, Residual) else Residual(x)


def left_open(layers: Any, config: ma.AttentionConfig | None) -> bool:
    """Check whether layers return a branch that is not added: if each is compiled alone.

    If the backward recomputes a layer, both tokens and branch would be saved for it.

    Args:
        layers: from `make_layers`.
    """
    recomputes = config is not None and config.remat_policy != "NONE"
    return not are_stacked(layers) and not recomputes


def rows_of(table: Float[Array, "#B #F R D"], base: Any = None) -> Iterator[ModulationRow]:
    """Yield the rows of a modulation table, in order.

    Args:
        table: computed from the times.
        base: the block's learned table, [1, R, D], which is added; default none.
    """
    learned = None if base is None else jnp.asarray(base)[:, None]
    return (ModulationRow(table, row, learned) for row in range(table.shape[2]))
