"""Make every parameter matter: in many layers, initial ones are 0 or 1."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


def moved(state: Any) -> Any:
    """Return arrays plus a tenth of normal numbers, always the same ones."""
    rng = np.random.default_rng(0)
    by = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype), state)
    return _sum(state, by)


@jax.jit
def _sum(state: Any, by: Any) -> Any:
    """Add in one program; operation by operation, each shape compiles several."""
    return jax.tree.map(lambda x, y: x + 0.1 * y, state, by)
