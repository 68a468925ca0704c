"""Modules under Explicit mesh axes: a call runs where the axes are Auto, and its results lie over
the Explicit ones as its states do.
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
    """Let a module's method run on a mesh with Explicit axes; elsewhere it runs as it is.

    Args:
        out_specs: of the method's own arguments: where its results lie, a tree of `PartitionSpec`.
    """

    def decorate(method: Method) -> Method:
        @wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            # One projection tells of all: flattening the module is a tenth of a small call.
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
    nnx.update((module, rngs), drawn)  # what dropout has drawn
    return result


# ---- where results lie ---------------------------------------------------------------------------


def like_states(module: Any, hidden_states: Any, *_: Any, **__: Any) -> PartitionSpec:
    """Place the output [B, T, out_dim] as the states; its channels too, where they are as many."""
    batch, tokens, channels = _spec(hidden_states)
    return PartitionSpec(batch, tokens, channels if module.out_dim == module.query_dim else None)


def like_states_without_cache(module: Any, hidden_states: Any, *others: Any) -> PartitionSpec:
    """Place the output as the states, and refuse a cache: it lies where `KVCache.empty` put it.

    Raises:
        MeshError: there is a cache among the arguments.
    """
    if any(isinstance(x, CacheLayer) for x in others):
        rule = "a cache lies over axes that the compiler may use, and these are Explicit"
        remedy = "make the mesh with config.make_mesh(), or axis_types=(AxisType.Auto, ...)"
        raise MeshError("mesh", "Explicit axes beside a cache", rule, remedy)
    return like_states(module, hidden_states)


def like_both(
    module: Any, hidden_states: Any, encoder_hidden_states: Any, *_: Any, **__: Any
) -> tuple[PartitionSpec, PartitionSpec | None]:
    """Place the outputs of a picture and a text as the states of each."""
    picture, text = like_states(module, hidden_states), _spec(encoder_hidden_states)
    if not module.text_out:
        return picture, None
    return picture, text if module.out_proj else PartitionSpec(*text[:2], None)


def like_both_without_bias(module: Any, *states: Any, **_: Any) -> Any:
    """Place outputs as `like_both` does; biases that are left out are whole on each device."""
    bias = PartitionSpec() if module.out_proj else None
    picture, text = like_both(module, *states)
    return (picture, bias), None if text is None else (text, bias)


def like_text(module: Any, text: Any, *_: Any, **__: Any) -> PartitionSpec:
    """Place keys and values [B, S, K, H] as the states of their batch, whole beyond it."""
    batch = _spec(text)[0]
    return PartitionSpec(batch, None, None, None)


def _spec(states: Any) -> PartitionSpec:
    """Return where states [B, T, C] lie; what is none of them is refused by the method itself."""
    is_states = isinstance(states, jax.Array) and states.ndim == 3
    return spec_of_type(states) if is_states else PartitionSpec(None, None, None)
