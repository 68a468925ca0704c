"""The layers of one call: computed, or what they added in earlier steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from common.scan import Around, Layers

from .steps import SKIPPING, Step

Added = Any  # what layers added, or what they gave if they do not add: arrays


def keeping(step: Step, kept: dict[str, Added], name: str) -> Around:
    """Return a hook that runs all layers, and keeps what those of the span added, by a name."""

    def around(layers: Layers, x: Any) -> Any:
        first, last = step.span or (0, layers.count)
        before = layers.run(x, range(first)) if first else x
        after = layers.run(before, range(first, last))
        kept[name] = jax.tree.map(jnp.subtract, after, before) if layers.add else after
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


def skipping(numbers: Sequence[int], around: Around | None) -> Around:
    """Return a hook that leaves layers out, inside another hook."""

    def without(layers: Layers, x: Any) -> Any:
        def run(x: Any, span: range) -> Any:
            start = span.start
            for stop in (*(n for n in sorted(set(numbers)) if n in span), span.stop):
                x = layers.run(x, range(start, stop)) if stop > start else x
                start = stop + 1
            return x

        return (around or Layers.all)(layers._replace(run=run), x)

    return without


def hook_of(
    step: Step, name: str, kept: dict[str, Added], added: Sequence[Added], weights: Sequence[Any]
) -> Around | None:
    """Return the hook of a prediction in a step of this kind; None for one without a hook."""
    if step.layers == "reuse":
        hook = reusing(step, added, weights)
    else:
        hook = keeping(step, kept, name) if step.keeps else None
    return skipping(step.skip, hook) if step.skip and name in SKIPPING else hook
