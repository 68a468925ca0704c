"""`vmap` over a call whose mask has arrays: one launch, in which each example is a batch row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from maxattn.kernels.base import Grads, Inputs, Result, Rows, with_batch_folded

Out = TypeVar("Out", Result, Grads)


def with_rows_folded(compute: Callable[..., Out], inputs: Inputs, *rows: Rows) -> Out:
    """Return `compute(inputs, *rows)`; under `vmap`, of one batch that holds the mapped axis too.

    Arrays of the mask that all batch rows share are not mapped; where they are, the calls follow
    each other.

    Args:
        compute: a kernel's forward or backward.
        inputs: with lengths, flags or ids, whose first axis is the batch.
        rows: what a backward needs beside them.
    """
    arrays, tree = jax.tree.flatten(inputs.mask)
    own = [x.shape[0] == inputs.q.shape[0] for x in arrays]
    offsets = inputs.q_offset, inputs.kv_offset
    traced = [isinstance(x, jax.Array) for x in offsets]

    def run(q: Any, k: Any, v: Any, mine: Any, given: Any, shared: Any) -> Out:
        left, (others, places) = iter(mine), (iter(x) for x in shared)
        mask = jax.tree.unflatten(tree, [next(left if is_own else others) for is_own in own])
        first, of_keys = (
            next(places) if here else x for x, here in zip(offsets, traced, strict=True)
        )
        found = inputs.replace(q=q, k=k, v=v, mask=mask, q_offset=first, kv_offset=of_keys)
        return compute(found, *given)

    mine = [x for x, is_own in zip(arrays, own, strict=True) if is_own]
    others = [x for x, is_own in zip(arrays, own, strict=True) if not is_own]
    places = [x for x, here in zip(offsets, traced, strict=True) if here]
    operands = inputs.q, inputs.k, inputs.v, mine, rows
    return with_batch_folded(run, *operands, shared=(others, places))
