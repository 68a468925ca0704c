"""The all-to-all within groups of a mesh axis's devices, under every transformation.

jax (0.11) can neither batch `jax.lax.all_to_all` within groups, nor differentiate it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

Groups = tuple[tuple[int, ...], ...]


def all_to_all(
    x: Array, axis: str, split: int, join: int, groups: Sequence[Sequence[int]] | None
) -> Array:
    """Split one axis of a local array over a mesh axis, and join the received parts along another.

    `groups` lists the devices that exchange with each other; None for all devices of the axis.
    """
    if groups is None:
        return _exchanged(x, axis=axis, split=split, join=join, groups=None)
    fixed = tuple(tuple(group) for group in groups)
    return exchange_p.bind(x, axis=axis, split=split, join=join, groups=fixed)


def _exchanged(x: Array, *, axis: str, split: int, join: int, groups: Groups | None) -> Array:
    listed = None if groups is None else [list(group) for group in groups]
    return jax.lax.all_to_all(x, axis, split, join, axis_index_groups=listed, tiled=True)


def _shape(x: Any, *, axis: str, split: int, join: int, groups: Groups) -> Any:
    sizes, devices = list(x.shape), len(groups[0])
    sizes[split] //= devices
    sizes[join] *= devices
    return x.update(shape=tuple(sizes))


def _batch(args: Any, axes: Any, *, split: int, join: int, **how: Any) -> Any:
    # The mapped axis is moved to the front, so the indexes of split and join grow by 1.
    x = jnp.moveaxis(args[0], axes[0], 0)
    return exchange_p.bind(x, split=split + 1, join=join + 1, **how), 0


def _transpose(cotangent: Any, x: Any, *, split: int, join: int, **how: Any) -> Any:
    return [exchange_p.bind(cotangent, split=join, join=split, **how)]


exchange_p = Primitive("all_to_all_in_groups")
exchange_p.def_impl(
    partial(jax.jit, static_argnames=("axis", "split", "join", "groups"))(_exchanged)
)
exchange_p.def_abstract_eval(_shape)
mlir.register_lowering(exchange_p, mlir.lower_fun(_exchanged, multiple_results=False))
batching.primitive_batchers[exchange_p] = _batch
ad.deflinear2(exchange_p, _transpose)
