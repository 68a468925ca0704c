"""Arrays of zeros that lie on a mesh from the start: no device ever holds all of one."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def zeros_on_mesh(shape: tuple[int, ...], dtype: str, mesh: Any, spec: PartitionSpec) -> jax.Array:
    """Make zeros, each device its part.

    Args:
        shape, dtype: of the array.
        mesh: with devices, the surrounding one, or None.
        spec: how the array lies over it.
    """
    if mesh is None:
        return jnp.zeros(shape, dtype)
    where = NamedSharding(mesh, spec) if isinstance(mesh, Mesh) else spec
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=where)()
