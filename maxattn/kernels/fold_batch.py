"""`vmap` over a library's kernel: the mapped axis becomes part of the batch.

The libraries' `vmap` rules refuse some calls: fa4-jax refuses lengths, and cuDNN and
TransformerEngine refuse calls in which some operands are mapped and others are not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def with_batch_folded(run: Callable[..., Any], *operands: Any, shared: Any = None) -> Any:
    """Return `run(*operands)`; under `vmap`, fold the mapped axis into the batch of one call.

    Operands that are not mapped are repeated along the mapped axis.

    Args:
        run: a function from arrays to arrays that closes over no arrays.
        operands: arrays or trees of arrays; axis 0 of every operand and result is the batch.
        shared: arrays without a batch axis, which are the last argument of `run`; default None. If
            these arrays are mapped, the calls run one after the other.
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
