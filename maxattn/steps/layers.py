"""`blocks` runs a model's layers, in the one place at which steps can reuse or skip them.

Layers are a list (each compiled, each with weights of its own), modules that `nnx.vmap` stacked
along the first axis (scanned: compiled once), or a model's own `Layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxattn._remat import remat
from maxattn.config import AttentionConfig
from maxattn.errors import InputError
from maxattn.jax_private.observed import layer_named

OneLayer = Callable[[Any, Any, Any, Any], Any]  # of a layer, x, the layer's own part and its number


class Layers(NamedTuple):
    """The layers of one call of `blocks`, as a hook gets them.

    Args:
        count: number of layers.
        run: runs a range of them: (x, range) -> the result of the last of these layers.
        add: whether layers add to x, so that the sum of their updates can be reused. If False,
            their result is reused.
        beside: arrays that every layer takes beside x, such as the embedding of the time.
    """

    count: int
    run: Callable[[Any, range], Any]
    add: bool = True
    beside: Any = ()

    def all(self, x: Any) -> Any:
        """Run every layer."""
        return self.run(x, range(self.count))


Hook = Callable[[Layers, Any], Any]
"""Stands around a call of `blocks`: takes the layers and x, and returns what the last one would."""

_HOOK: ContextVar[Hook | None] = ContextVar("maxattn.steps.hook", default=None)


@contextmanager
def around(hook: Hook | None) -> Iterator[None]:
    """Call a hook in every call of `blocks` that is traced inside; None removes it."""
    token = _HOOK.set(hook)
    try:
        yield
    finally:
        _HOOK.reset(token)


def blocks(
    layers: Any,
    x: Any,
    *beside: Any,
    each: Any = None,
    call: Callable[..., Any] | None = None,
    config: AttentionConfig | None = None,
    add: bool = True,
) -> Any:
    """Run a model's layers one after the other: `x = layer(x, *beside)`.

    Without a surrounding `steps.forward` it is this loop and nothing else. Inside one, a step can
    reuse what the layers added in an earlier step, or leave layers out.

    Args:
        layers: modules or functions in a list or `nnx.List`; one module whose variables have a
            leading axis of layers, as `nnx.vmap` makes; or `Layers`.
        x: array or tree of arrays that the first layer takes. The first array decides, if steps do.
        beside: further arguments of every layer.
        each: what each layer has of its own, such as keys and values of a text: a sequence, or a
            tree of arrays with a leading axis for stacked layers. It is the last argument.
        call: runs one layer, as `call(layer, x, *beside)`; default the layer itself.
        config: its `remat_policy` governs what a training step keeps of each layer.
        add: whether layers return x plus something; False for the middle of a UNet, say.

    Returns:
        What the last layer returns.

    Raises:
        InputError: there are no layers.

    >>> layers = nnx.List([nnx.Linear(8, 8, rngs=nnx.Rngs(i)) for i in range(3)])
    >>> x = jnp.ones((1, 8))
    >>> bool((ma.blocks(layers, x) == layers[2](layers[1](layers[0](x)))).all())
    True
    """
    if not isinstance(layers, Layers):
        stack, one = layers, remat(call or (lambda layer, *args: layer(*args)), config)

        def run_one(layer: Any, x: Any, own: Any, number: Any) -> Any:
            return one(layer, x, *beside, *(() if own is None else (own,)))

        def span_of(x: Any, span: range) -> Any:
            return run_layers(run_one, stack, x, each, span)

        layers = Layers(count_layers(stack), span_of, add, beside)
    if not layers.count:
        raise InputError("layers", "none", "a model runs at least one layer", "pass its layers")
    hook = _HOOK.get()
    return layers.all(x) if hook is None else hook(layers, x)


# ---- a list or a stack ---------------------------------------------------------------------------


def are_stacked(layers: Any) -> bool:
    """Check whether layers are one module whose variables have a leading axis of layers."""
    return isinstance(layers, nnx.Module) and not isinstance(layers, nnx.List)


def count_layers(layers: Any) -> int:
    """Return the number of layers in a list or a stack."""
    return len(jax.tree.leaves(nnx.state(layers))[0]) if are_stacked(layers) else len(layers)


def run_layers(
    run: OneLayer, layers: Any, x: Any, each: Any = None, span: range | None = None
) -> Any:
    """Run layers in their order, with the number of each.

    Stacked layers may be closed over by functions that jax traces, such as `jax.jit` or the
    `lax.scan` of a sampler, which nnx's own scan refuses.

    Args:
        run: a function of the layer, x from the layer before it, its part of `each` and its number,
            which is traced in a scan.
        layers: a list or a stack.
        x: input of the first layer.
        each: a sequence or a tree of arrays with a leading axis of layers; default None for all.
        span: numbers of the layers that run; default all.

    Returns:
        The result of the last layer.
    """
    count, hooked = count_layers(layers), _HOOK.get() is not None
    parts = jax.tree.leaves(each) if each is None or are_stacked(layers) else [each]
    if {*map(len, parts)} - {count}:
        rule = f"it has a part for each of {count} layers"
        raise InputError("each", f"{max(map(len, parts))} parts", rule, f"give {count}")
    span = range(count) if span is None else span
    if not are_stacked(layers):
        for number in span:
            layer = _copied(layers[number]) if hooked else layers[number]
            with layer_named(layer):
                x = run(layer, x, None if each is None else each[number], number)
        return x
    graph, changing, fixed = nnx.split(layers, nnx.Any(nnx.RngState, nnx.BatchStat), ...)

    def step(x: Any, own: tuple[Any, Any, Any, Any]) -> tuple[Any, Any]:
        changing, fixed, part, number = own
        layer = nnx.merge(graph, changing, fixed)
        with layer_named(layer):
            out = run(layer, x, part, number)
        return out, nnx.state(layer, nnx.Any(nnx.RngState, nnx.BatchStat))

    def sliced(x: Any, number: Any) -> tuple[Any, None]:
        # Sliced where it is read: a slice of all layers would be a copy of the weights.
        at = partial(jax.lax.dynamic_index_in_dim, index=number, keepdims=False)
        return step(x, (*jax.tree.map(at, (changing, fixed, each)), number))[0], None

    numbers = jnp.arange(span.start, span.stop)
    if len(span) < count:
        return jax.lax.scan(sliced, x, numbers)[0]
    x, changed = jax.lax.scan(step, x, (changing, fixed, each, numbers))
    if jax.tree.leaves(changed) and not hooked:
        nnx.update(layers, changed)  # the counts of dropout and the statistics of a norm
    return x


def _copied(layer: Any) -> Any:
    """Rebuild a module for use in a branch of `lax.cond`, which is another trace."""
    if not isinstance(layer, nnx.Module):
        return layer
    graph, state = nnx.split(layer)
    return nnx.merge(graph, jax.tree.map(lambda x: x, state))
