"""Normal draws outside of a program, from a few programs for all shapes.

jax compiles one program a shape, as long for ten numbers as for a thousand; models of many layers
have many shapes. Its bits depend on the key and the place alone, so the first numbers of a longer
draw are those of a shorter one (`tests/test_draws.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import random
from jax.core import Tracer

HOME = getattr(random, "core", random)  # of jax's draws
SIZES = (1 << 10, 1 << 13, 1 << 16)  # numbers that are drawn


def _longer(draw: Callable[..., Any]) -> Callable[..., Any]:
    """Return a draw's first numbers out of one of `SIZES`; what that does not fit goes to jax."""

    @wraps(draw)
    def drawn(key: Any, *bounds: Any, **how: Any) -> Any:
        if not _is_plain(key, bounds, how):
            return draw(key, *bounds, **how)
        size = prod(how["shape"])
        most = next(n for n in SIZES if n >= size)
        longer = np.asarray(draw(key, *bounds, shape=(most,), dtype=how["dtype"]))
        return jnp.asarray(longer[:size].reshape(how["shape"]))

    return drawn


def _is_plain(key: Any, bounds: tuple[Any, ...], how: dict[str, Any]) -> bool:
    """Say whether a draw is outside of any program and mesh, and short."""
    return (
        isinstance(key, jax.Array)
        and not isinstance(key, Tracer)
        and not getattr(key, "_committed", True)
        and all(isinstance(x, int | float) for x in bounds)
        and how.keys() == {"shape", "dtype"}
        and how["shape"] is not None
        and prod(how["shape"]) <= SIZES[-1]
        and getattr(jax.config, "jax_threefry_partitionable", False)
        and jax.sharding.get_abstract_mesh().empty
    )


def share() -> None:
    """Let `jax.random.normal` and `truncated_normal` share programs."""
    for name in ("_normal", "_truncated_normal"):
        if hasattr(HOME, name):
            setattr(HOME, name, _longer(getattr(HOME, name)))
