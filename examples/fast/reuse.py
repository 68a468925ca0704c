"""The layers of one call: computed, or what they added in earlier steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common.scan import Around, Layers

from .steps import Step

Added = Any  # what layers added, or what they gave if they do not add: arrays


def keeping(step: Step, kept: list[Added]) -> Around:
    """Return a hook that runs all layers, and appends what those of the span added."""

    def around(layers: Layers, x: Any) -> Any:
        first, last = step.span or (0, layers.count)
        before = layers.run(x, range(first)) if first else x
        after = layers.run(before, range(first, last))
        kept.append(jax.tree.map(jnp.subtract, after, before) if layers.add else after)
        return layers.run(after, range(last, layers.count)) if last < layers.count else after

    return around


def reusing(step: Step, added: Sequence[Added], weights: Sequence[Any]) -> Around:
    """Return a hook that adds what the layers of the span added in earlier steps.

    Args:
        step: with the span.
        added: by the steps that were kept, the newest first.
        weights: of them; the single weight of one is 1, and multiplies nothing.
    """

    def total(*parts: Any) -> Any:
        if len(parts) == 1:
            return parts[0]
        (last, before), (of_last, of_before) = (x.astype(jnp.float32) for x in parts), weights
        return (of_last * last + of_before * before).astype(parts[0].dtype)

    def around(layers: Layers, x: Any) -> Any:
        first, last = step.span or (0, layers.count)
        x, found = layers.run(x, range(first)) if first else x, jax.tree.map(total, *added)
        x = jax.tree.map(jnp.add, x, found) if layers.add else found
        return layers.run(x, range(last, layers.count)) if last < layers.count else x

    return around


def hook_of(
    step: Step, kept: list[Added], added: Sequence[Added], weights: Sequence[Any]
) -> Around | None:
    """Return the hook of a call in a step of this kind; None for a call without one."""
    if step.layers == "reuse":
        return reusing(step, added, weights)
    return keeping(step, kept) if step.keeps else None
