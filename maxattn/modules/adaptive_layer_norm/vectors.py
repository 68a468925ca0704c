"""The vectors that come with an adaptive norm: rows of tables, which nobody adds up beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@partial(jax.tree_util.register_dataclass, data_fields=["table", "base"], meta_fields=["row"])
@dataclass(frozen=True)
class ModulationRow:
    """Name a row of a modulation: table[:, :, row] + base[:, :, row].

    A kernel reads both where they lie; XLA adds them up.

    Args:
        table: [B or 1, F or 1, R, D], of all frames' times; F divides the tokens.
        row: of the R.
        base: as `table`, such as what a block learned; default none.

    >>> ModulationRow(jnp.ones((1, 3, 6, 64)), 2, jnp.ones((1, 1, 6, 64))).value().shape
    (1, 3, 64)
    """

    table: Float[Array, "#B #F R D"]
    row: int = field(default=0)
    base: Float[Array, "#B #F R D"] | None = None

    def value(self) -> Float[Array, "#B #F D"]:
        """Return the row in float32."""
        return sum_of_rows(self.parts, (self.row,) * len(self.parts))

    @property
    def parts(self) -> tuple[Float[Array, "#B #F R D"], ...]:
        """Return the arrays whose rows are added."""
        return (self.table,) if self.base is None else (self.base, self.table)


class VectorParts(NamedTuple):
    """Say of what a vector is the sum.

    Args:
        rows: of the arrays [B, F, R, D] that are its parts.
        constant: added to them.
    """

    rows: tuple[int, ...]
    constant: float = 0.0


def sum_of_rows(
    parts: tuple[Float[Array, "#B #F R D"], ...], rows: tuple[int, ...]
) -> Float[Array, "#B #F D"]:
    """Add a row of each array in float32."""
    each = [part[:, :, row].astype(jnp.float32) for part, row in zip(parts, rows, strict=True)]
    return sum(each[1:], each[0])
