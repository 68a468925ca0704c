"""Steps that decide as they run whether they compute: one `lax.cond` in a step's program.

The predicate is of means over all devices of a mesh, so that it is the same on each of them, and
collectives in the branch that runs have all their devices. Rows that fill up the devices do not
count.

Sources: first-block cache, https://github.com/chengzeyi/ParaAttention; EasyCache, Zhou et al. 2025,
https://arxiv.org/abs/2507.02860.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxattn_examples.common.scan import Around, Layers

from .guidance import Predictions

EASYCACHE = "easycache"


Mean = Callable[[Array], Float[Array, ""]]


class FirstBlock(NamedTuple):
    """What a call with a first-block cache keeps, of the last step that computed.

    Args:
        added: by the layers after the first ones.
        first: by the first ones, to what the indicator is of.
    """

    added: Any
    first: Array


class Easy(NamedTuple):
    """What a step with EasyCache keeps.

    Args:
        added: by the model to the sample, in each prediction of the last step that computed.
        with_: the prediction with the text in that step, and
        at: its sample.
        x: the sample of the step before.
        error: summed since that step.
        rate: how much the prediction changed for one of the sample, over the last two such steps.
    """

    added: Predictions
    with_: Array
    at: Array
    x: Array
    error: Float[Array, ""]
    rate: Float[Array, ""]


def first_block(
    blocks: int,
    before: FirstBlock | None,
    threshold: Array | None,
    keep: Callable[..., None],
    mean: Mean,
) -> Around:
    """Return a hook that runs the first layers, and reuses the others where these changed little.

    Args:
        blocks: first layers.
        before: what an earlier step kept; None computes.
        threshold: of the change, relative to what the first layers had added.
        keep: is given what later steps take, and whether this one computed.
        mean: of a change.
    """

    def around(layers: Layers, x: Any) -> Any:
        head = layers.run(x, range(blocks))
        first = jax.tree.leaves(head)[0] - jax.tree.leaves(x)[0]

        def compute() -> tuple[Any, FirstBlock]:
            y = layers.run(head, range(blocks, layers.count))
            return y, FirstBlock(jax.tree.map(jnp.subtract, y, head), first)

        if before is None or threshold is None:
            y, kept = compute()
            keep(kept, None)
            return y
        reuse = mean(first - before.first) / mean(before.first) < threshold
        again = jax.tree.map(jnp.add, head, before.added), before
        y, kept = jax.lax.cond(reuse, lambda: again, compute)
        keep(kept, ~reuse)
        return y

    return around


def easycache(
    x: Array,
    predict: Callable[[], Predictions],
    before: Easy | None,
    threshold: Array | None,
    mean: Mean,
) -> tuple[Predictions, Easy, Bool[Array, ""] | None]:
    """Return predictions, computed or those of an earlier step; what is kept; if they are computed.

    The prediction is expected to change as the sample does, at the rate of the last computed steps.

    Args:
        x: what the model is given.
        predict: computes.
        before: what the step before kept; None computes.
        threshold: of the summed change; one below 0 computes.
        mean: of a change.
    """
    infinite = jnp.float32(jnp.inf)
    if before is None or threshold is None:
        found = predict()
        added = jax.tree.map(lambda y: y - x, found)
        return found, Easy(added, found.with_, x, x, jnp.float32(0), infinite), None
    error = before.error + before.rate * mean(x - before.x) / mean(before.with_)
    reuse = error < threshold

    def again() -> tuple[Predictions, Easy]:
        return jax.tree.map(lambda a: x + a, before.added), before._replace(x=x, error=error)

    def compute() -> tuple[Predictions, Easy]:
        found = predict()
        rate = mean(found.with_ - before.with_) / mean(x - before.at)
        added = jax.tree.map(lambda y: y - x, found)
        return found, Easy(added, found.with_, x, x, jnp.float32(0), rate)

    found, kept = jax.lax.cond(reuse, again, compute)
    return found, kept, ~reuse


def mean_size(samples: int, wanted: Array | None, x: Array) -> Float[Array, ""]:
    """Return the mean size of an array's numbers, over the rows of the wanted samples.

    Args:
        samples: that are drawn; a call of both predictions has two rows for each.
        wanted: how many of them, the first ones; None for all.
        x: rows of a call.
    """
    rows = jnp.mean(jnp.abs(x.astype(jnp.float32)), axis=range(1, x.ndim))
    where = None if wanted is None else jnp.arange(len(rows)) % samples < wanted
    return jnp.mean(rows, where=where)
