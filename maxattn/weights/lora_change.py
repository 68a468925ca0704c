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


class LowRank(NamedTuple):
    """Hold factor * B A for a kernel [out, in] or [out, in, *window].

    Args:
        down: A, [rank, in * window].
        up: B, [out, rank].
        factor: multiplies the product.
    """

    down: np.ndarray
    up: np.ndarray
    factor: float

    def whole(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the change of a kernel of this shape."""
        with np.errstate(over="ignore", invalid="ignore"):
            return (self.factor * (self.up @ self.down)).reshape(shape)

    def at_most(self) -> float:
        """Return what no number of it exceeds, without the product."""
        with np.errstate(over="ignore", invalid="ignore"):
            return abs(self.factor) * float((abs(self.up) @ abs(self.down).max(axis=1)).max())


class Difference(NamedTuple):
    """Hold factor * D for a parameter of any shape."""

    difference: np.ndarray
    factor: float

    def whole(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the change of a parameter of this shape."""
        with np.errstate(over="ignore", invalid="ignore"):
            return (self.factor * self.difference).reshape(shape)

    def at_most(self) -> float:
        """Return what no number of it exceeds."""
        with np.errstate(over="ignore", invalid="ignore"):
            return abs(self.factor) * float(abs(self.difference).max(initial=0.0))


Change = LowRank | Difference


def check_sum(module: nnx.Module, entry: Entry, change: Change) -> None:
    """Refuse a change after which finite numbers of a parameter would not be.

    Raises:
        WeightsError: naming the layer.
    """
    old = jnp.asarray(checks.value_at(module, entry))
    old = old if entry.layer is None else old[entry.layer]
    most, finite = float(jnp.finfo(old.dtype).max), jnp.isfinite(old)
    # Nearly every change is far from that: its product, most of the work, is then taken only once,
    # to be added.
    if float(jnp.abs(jnp.where(finite, old, 0)).max()) + change.at_most() < most / 2:
        return
    if not bool((jnp.isfinite(_sum(old, _ours(entry, change))) | ~finite).all()):
        limit = f"the kernel is {old.dtype.name}, which ends at {most:g}"
        rule = f"{limit}, and with the change it would go beyond"
        wider = "" if old.dtype == jnp.float32 else ", or merge into float32 parameters"
        layer = entry.name.removesuffix(".weight")
        raise WeightsError("LoRA", layer, rule, f"take a smaller scale{wider}")


def add(module: nnx.Module, entry: Entry, change: Change) -> None:
    """Add a change to a parameter, or to one layer of a stacked one."""
    variable, old = variable_at(module, entry.path), jnp.asarray(checks.value_at(module, entry))
    added = _ours(entry, change)
    if entry.layer is None:
        variable.set_value(_sum(old, added))
    else:  # only the layer's slice is in float32: a stack of all may be half of a device's memory
        variable.set_value(old.at[entry.layer].set(_sum(old[entry.layer], added)))


def _ours(entry: Entry, change: Change) -> jax.Array:
    """Return a change with the axes of the parameter."""
    whole: Any = change.whole(entry.shape)
    return jnp.asarray(whole.transpose(entry.axes))


def _sum(old: jax.Array, added: jax.Array) -> jax.Array:
    return (old.astype(jnp.float32) + added).astype(old.dtype)
