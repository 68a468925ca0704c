"""What LoRA adds to a parameter, and the sum; all is computed in float32."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxattn.errors import WeightsError
from maxattn.weights import checks
from maxattn.weights.access import variable_at
from maxattn.weights.names import Entry

_BEYOND = np.errstate(over="ignore", invalid="ignore")  # `check_sum` refuses what overflows


class LowRank(NamedTuple):
    """factor * B A for a kernel [out, in] or [out, in, *window].

    Args:
        down: A, [rank, in * window].
        up: B, [out, rank].
        factor: multiplies the product.
    """

    down: np.ndarray
    up: np.ndarray
    factor: float

    @_BEYOND
    def whole(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the change of a kernel of this shape."""
        return (self.factor * (self.up @ self.down)).reshape(shape)

    @_BEYOND
    def at_most(self) -> float:
        """Return a bound of its numbers, without the product."""
        return abs(self.factor) * float((abs(self.up) @ abs(self.down).max(axis=1)).max())


class Difference(NamedTuple):
    """factor * D for a parameter of any shape."""

    difference: np.ndarray
    factor: float

    @_BEYOND
    def whole(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the change of a parameter of this shape."""
        return (self.factor * self.difference).reshape(shape)

    @_BEYOND
    def at_most(self) -> float:
        """Return a bound of its numbers."""
        return abs(self.factor) * float(abs(self.difference).max(initial=0.0))


Change = LowRank | Difference


def check_sum(module: nnx.Module, entry: Entry, change: Change) -> None:
    """Refuse a change that takes finite numbers of a parameter beyond its dtype.

    Raises:
        WeightsError: naming the layer.
    """
    old = jnp.asarray(checks.value_at(module, entry))
    old = old if entry.layer is None else old[entry.layer]
    most, finite = float(jnp.finfo(old.dtype).max), jnp.isfinite(old)
    # Nearly every change is far from that. Its product, most of the work, is then taken only once,
    # to be added.
    if float(jnp.abs(jnp.where(finite, old, 0)).max()) + change.at_most() < most / 2:
        return
    if not bool((jnp.isfinite(_sum(old, entry, change)) | ~finite).all()):
        limit = f"the kernel is {old.dtype.name}, which ends at {most:g}"
        rule = f"{limit}, and with the change it would go beyond"
        wider = "" if old.dtype == jnp.float32 else ", or merge into float32 parameters"
        layer = entry.name.removesuffix(".weight")
        raise WeightsError("LoRA", layer, rule, f"take a smaller scale{wider}")


def add(module: nnx.Module, entry: Entry, change: Change) -> None:
    """Add a change to a parameter, or to one layer of a stacked one."""
    variable, old = variable_at(module, entry.path), jnp.asarray(checks.value_at(module, entry))
    if entry.layer is None:
        variable.set_value(_sum(old, entry, change))
    else:  # only the layer's slice is in float32: a stack of all may be half of a device's memory
        variable.set_value(old.at[entry.layer].set(_sum(old[entry.layer], entry, change)))


def _sum(old: jax.Array, entry: Entry, change: Change) -> jax.Array:
    added: Any = change.whole(entry.shape)
    return (old.astype(jnp.float32) + jnp.asarray(added.transpose(entry.axes))).astype(old.dtype)
