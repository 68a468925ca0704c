"""The new noise of samplers that re-noise: it depends on seed, place in the batch and step alone.

A sample keeps its noise on any mesh, and in a batch of any size.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt32

Keys = UInt32[Array, "B 2"] | UInt32[np.ndarray, "B 2"]

# Named, so that the numbers do not depend on a flag of jax.
KIND = "threefry2x32"


def keys_of(seed: int, rows: int) -> UInt32[np.ndarray, "B 2"]:
    """Make a key for each place in the batch.

    Args:
        seed: of the run.
        rows: of the batch.
    """
    first = jax.random.key(seed, impl=KIND)
    keys = (jax.random.key_data(jax.random.fold_in(first, row)) for row in range(rows))
    return np.stack([np.asarray(key) for key in keys])


def drawn(keys: Keys, step: Any, shape: tuple[int, ...]) -> Float[Array, "B ..."]:
    """Draw the standard normal noise of a step.

    Args:
        keys: from `keys_of`.
        step: 0 for the first; may be traced.
        shape: of one sample.
    """

    def one(key: UInt32[Array, " 2"]) -> Float[Array, "..."]:
        of_step = jax.random.fold_in(jax.random.wrap_key_data(key, impl=KIND), step)
        return jax.random.normal(of_step, shape)

    return jax.vmap(one)(jnp.asarray(keys))
