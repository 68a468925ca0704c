"""`vmap` over a call of a library: the mapped axis becomes part of the batch.

The libraries' own rules refuse some calls: fa4-jax refuses lengths, cuDNN and TransformerEngine
refuse operands of which only some are mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def with_batch_folded(run: Callable[..., Any], *operands: Any, shared: Any = None) -> Any:
    """Return `run(*operands)`; under `vmap`, in one call whose batch has the mapped axis too.

    Operands that are not mapped are repeated along the mapped axis.

    Args:
        run: from arrays to arrays; it closes over no arrays.
        operands: arrays, or trees of them; the first axis of every array, in and out, is the batch.
        shared: the last argument of `run`, or None: arrays without a batch. If these are mapped,
            calls run one after the other.
    """

    @jax.custom_batching.custom_vmap
    def call(operands: Any, shared: Any) -> Any:
        return run(*operands) if shared is None else run(*operands, shared)

    @call.def_vmap
    def _folded(size: int, mapped: Any, operands: Any, shared: Any) -> tuple[Any, Any]:
        every = jax.tree.map(lambda x, m: x if m else _repeated(x, size), operands, mapped[0])
        if any(jax.tree.leaves(mapped[1])):
            ends = jax.tree.map(lambda x, m: x if m else _repeated(x, size), shared, mapped[1])
            apart = jax.lax.map(lambda x: with_batch_folded(run, *x[0], shared=x[1]), (every, ends))
        else:
            batch = jax.tree.leaves(every)[0].shape[1]
            flat = jax.tree.map(lambda x: x.reshape(size * batch, *x.shape[2:]), every)
            found = with_batch_folded(run, *flat, shared=shared)
            apart = jax.tree.map(lambda x: x.reshape(size, batch, *x.shape[1:]), found)
        return apart, jax.tree.map(lambda _: True, apart)

    return call(operands, shared)


def _repeated(x: Array, size: int) -> Array:
    return jnp.broadcast_to(x, (size, *x.shape))
