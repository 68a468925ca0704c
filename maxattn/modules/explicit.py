"""Run modules on a mesh with Explicit axes.

A call runs with Auto axes; its results then get the Explicit sharding of its hidden states.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, TypeVar, cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from maxattn.errors import MeshError
from maxattn.sharding import explicit_mesh, over_auto_axes, spec_of_type
from maxattn.streaming import CacheLayer

Method = TypeVar("Method", bound=Callable[..., Any])


def over_explicit_axes(out_specs: Callable[..., Any]) -> Callable[[Method], Method]:
    """Decorate a method to run on Explicit axes too; `out_specs` maps its arguments to specs."""

    def decorate(method: Method) -> Method:
        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            # One projection shows the mesh: flattening the module takes a tenth of a small call.
            mesh = explicit_mesh(args, kwargs, self.to_q)
            if mesh is None:
                return method(self, *args, **kwargs)
            given = signature(method).bind(self, *args, **kwargs).arguments
            given.pop("self")
            specs = out_specs(self, *given.values())
            return _run_over_auto_axes(method, self, given, mesh, specs)

        return cast(Method, run)

    return decorate


def _run_over_auto_axes(
    method: Any, module: nnx.Module, given: dict[str, Any], mesh: Any, specs: Any
) -> Any:
    rngs = given.pop("rngs", None)
    graph, drawn, state = nnx.split((module, rngs), nnx.RngState, ...)
    leaves, structure = jax.tree.flatten(given)
    is_array = [isinstance(x, jax.Array | np.ndarray) for x in leaves]
    arrays = [x for x, is_one in zip(leaves, is_array, strict=True) if is_one]

    def pure(drawn: Any, state: Any, arrays: list[Any]) -> tuple[Any, Any]:
        module, rngs = nnx.merge(graph, drawn, state)
        rest = iter(arrays)
        whole = [next(rest) if is_one else x for x, is_one in zip(leaves, is_array, strict=True)]
        given = jax.tree.unflatten(structure, whole) | ({} if rngs is None else {"rngs": rngs})
        result = method(module, **given)
        return result, nnx.state((module, rngs), nnx.RngState)

    result, drawn = over_auto_axes(pure, mesh, (specs, PartitionSpec()))(drawn, state, arrays)
    nnx.update((module, rngs), drawn)  # dropout's RNG counters
    return result


# ---- shardings of results ------------------------------------------------------------------------


def like_states(module: Any, hidden_states: Any, *_: Any, **__: Any) -> PartitionSpec:
    """Shard the output like the hidden states; its channels only if out_dim is query_dim."""
    batch, tokens, channels = _spec(hidden_states)
    return PartitionSpec(batch, tokens, channels if module.out_dim == module.query_dim else None)


def like_states_without_cache(module: Any, hidden_states: Any, *others: Any) -> PartitionSpec:
    """Shard the output like the hidden states; refuse a cache, which needs Auto axes."""
    if any(isinstance(x, CacheLayer) for x in others):
        rule = "the cache needs Auto mesh axes"
        remedy = "make the mesh with config.make_mesh(), or axis_types=(AxisType.Auto, ...)"
        raise MeshError("mesh", "Explicit axes beside a cache", rule, remedy)
    return like_states(module, hidden_states)


def like_both(
    module: Any, hidden_states: Any, encoder_hidden_states: Any, *_: Any, **__: Any
) -> tuple[PartitionSpec, PartitionSpec | None]:
    """Shard the outputs of a picture and a text like their hidden states."""
    picture, text = like_states(module, hidden_states), _spec(encoder_hidden_states)
    if not module.text_out:
        return picture, None
    return picture, text if module.out_proj else PartitionSpec(*text[:2], None)


def like_both_without_bias(module: Any, *states: Any, **_: Any) -> Any:
    """Shard the outputs as `like_both` does; replicate the biases."""
    bias = PartitionSpec() if module.out_proj else None
    picture, text = like_both(module, *states)
    return (picture, bias), None if text is None else (text, bias)


def like_text(module: Any, text: Any, *_: Any, **__: Any) -> PartitionSpec:
    """Shard the batch axis of keys and values like that of the text; replicate other axes."""
    batch = _spec(text)[0]
    return PartitionSpec(batch, None, None, None)


def _spec(states: Any) -> PartitionSpec:
    # The method itself refuses states of a wrong type.
    is_states = isinstance(states, jax.Array) and states.ndim == 3
    return spec_of_type(states) if is_states else PartitionSpec(None, None, None)
