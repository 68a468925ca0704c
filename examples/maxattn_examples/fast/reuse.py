"""The layers of one call: computed, or what they added in earlier steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn_examples.common.scan import Around, Layers

from .cache_settings import FirstBlockSettings
from .deciding import Mean, first_block
from .steps import SKIPPING, Step

Added = Any  # what layers added, or what they gave if they do not add: arrays


@dataclass
class Notes:
    """What the calls of a step leave for later steps, by their names.

    Args:
        added: by layers.
        computed: whether a call computed, if it decided that.
    """

    added: dict[str, Added] = field(default_factory=dict)
    computed: dict[str, Array] = field(default_factory=dict)

    def keep(self, name: str, added: Added, computed: Array | None) -> None:
        """Keep what a call leaves."""
        self.added[name] = added
        if computed is not None:
            self.computed[name] = computed


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
    step: Step,
    name: str,
    notes: Notes,
    kept: tuple[Sequence[Added], Sequence[Any], Any],
    mean: Mean,
) -> Around | None:
    """Return the hook of a prediction in a step of this kind; None for one without a hook.

    Args:
        step: the kind.
        name: of the prediction.
        notes: take what it leaves.
        kept: what layers added, the newest first; weights of it; the threshold of a decision.
        mean: of a change, for a decision.
    """
    added, weights, threshold = kept
    hook = None
    if isinstance(step.decides, FirstBlockSettings):
        before = added[0] if step.layers == "decide" else None
        keep = partial(notes.keep, name)
        hook = first_block(step.decides.blocks, before, threshold, keep, mean)
    elif step.layers == "reuse":
        hook = reusing(step, added, weights)
    elif step.layers == "compute" and step.keeps and step.decides is None:
        hook = keeping(step, notes.added, name)
    return skipping(step.skip, hook) if step.skip and name in SKIPPING else hook
