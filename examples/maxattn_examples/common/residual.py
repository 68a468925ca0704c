"""Tokens and a layer's branch: the next norm adds it, in one pass over memory."""

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
    """Tokens, and a branch that is not yet added to them.

    Args:
        x: tokens.
        branch: what is to be added; default nothing.
    """

    x: Tokens
    branch: GatedBranch | None = None

    @property
    def total(self) -> Tokens:
        """Return the sum."""
        return self.x if self.branch is None else gated_sum(self.x, self.branch)

    def normed(
        self,
        norm: nnx.LayerNorm,
        scale: ModulationRow | None = None,
        shift: ModulationRow | None = None,
        mesh: Any = None,
    ) -> tuple[Tokens, Tokens]:
        """Return the sum, and the sum after a norm; arguments as for `adaptive_norm`."""
        return adaptive_norm(self.x, norm, scale, shift, branch=self.branch, mesh=mesh)


def residual(x: Tokens | Residual) -> Residual:
    """Return tokens with nothing to add; a residual as it is."""
    return x if isinstance(x, Residual) else Residual(x)


def left_open(layers: Any, config: ma.AttentionConfig | None) -> bool:
    """Check whether layers pass their branch on: if each is compiled on its own.

    A backward that computes a layer again would keep both, tokens and branch.

    Args:
        layers: from `make_layers`.
        config: attention's settings.
    """
    recomputes = config is not None and config.remat_policy != "NONE"
    return not are_stacked(layers) and not recomputes


def rows_of(table: Float[Array, "#B #F R D"], base: Any = None) -> Iterator[ModulationRow]:
    """Yield the rows of a modulation, in order.

    Args:
        table: what times say.
        base: what a block learned, [1, R, D]; default none.
    """
    learned = None if base is None else jnp.asarray(base)[:, None]
    return (ModulationRow(table, row, learned) for row in range(table.shape[2]))
