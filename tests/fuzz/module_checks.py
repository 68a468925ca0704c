"""Holds a module's output, and its gradients along random ways, to float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.fuzz.case import Names, Wrong
from tests.fuzz.float64 import EPS, Held, hold
from tests.fuzz.projections import (
    Heads,
    Inputs,
    Params,
    cross_attention,
    joint_attention,
    self_attention,
)

OF = {
    "FlaxAttention": self_attention,
    "CrossAttention": cross_attention,
    "JointAttention": joint_attention,
}
STEP = 1e-6


def check_of(built: Any) -> Callable[[Names], None]:
    """Return the check of a module's output and gradients."""

    def check(names: Names) -> None:
        params, inputs = params_of(names["layer"]), _inputs(built, names)
        s = built.sizes
        how = Heads(s.n, s.k, s.h, built.norm, built.eps, built.scale)

        def f(params: Params, x: np.ndarray) -> np.ndarray:
            return OF[built.kind](params, inputs._replace(x=x), how)

        _check_out(f(params, inputs.x), names, built.dtype)
        _check_gradients(f, params, inputs.x, names, built.dtype)

    return check


def params_of(module: Any) -> dict[str, np.ndarray]:
    """Return every parameter by its dotted path, in float64."""
    import jax
    from flax import nnx

    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(module, nnx.Param)))[0]
    return {".".join(str(k.key) for k in path): np.asarray(x, np.float64) for path, x in leaves}


def _inputs(built: Any, names: Names) -> Inputs:
    s = built.sizes
    x, text, image, bias = (
        None if names[n] is None else np.asarray(names[n], np.float64)
        for n in ("x", "text", "image", "bias")
    )
    allowed = built.tree.allowed(s) if built.tree else np.ones((1, 1, 1, 1), bool)
    return Inputs(np.asarray(x), text, image, allowed, bias, built.theta, built.style)


def _loose(dtype: str) -> float:
    """How far a module may be off, of its largest number: some roundings after each other."""
    return 200 * EPS[dtype] if dtype == "float32" else 12 * EPS[dtype]


def _check_out(want: np.ndarray, names: Names, dtype: str) -> None:
    bound = np.full(want.shape, _loose(dtype) * max(float(abs(want).max(initial=0)), 1.0))
    hold("out", names["out"], Held(want, bound), dtype, 1.0)


def _check_gradients(f: Any, params: Params, x: np.ndarray, names: Names, dtype: str) -> None:
    """Compare sum(gradient * way) with a difference of float64, for each parameter and x."""
    rng, way = np.random.default_rng(0), np.asarray(names["way"], np.float64)
    grads = _flat(names["grads"]) | {"x": np.asarray(names["dx"], np.float64)}
    for name, start in {**params, "x": x}.items():
        ahead = rng.standard_normal(start.shape)

        def at(step: float, name: str = name, ahead: np.ndarray = ahead) -> float:
            if name == "x":
                return float((f(params, x + step * ahead) * way).sum())
            return float((f({**params, name: params[name] + step * ahead}, x) * way).sum())

        want = (at(STEP) - at(-STEP)) / (2 * STEP)
        _hold_slope(name, grads.get(name), ahead, want, way, dtype)


def _hold_slope(
    name: str, grad: Any, ahead: np.ndarray, want: float, way: np.ndarray, dtype: str
) -> None:
    if grad is None or grad.shape != ahead.shape:
        raise Wrong(f"the gradient of {name} is {None if grad is None else grad.shape}")
    got = float((grad * ahead).sum())
    # A gradient that is 0, such as that of to_k's bias, is a sum of roundings all the same.
    rounded = 0.0 if dtype == "float32" else 0.05 * float(np.sqrt((way**2).sum()))
    size = float(np.sqrt((grad**2).sum())) + abs(want) + 1.0 + rounded
    if not abs(got - want) <= 3 * _loose(dtype) * size:
        line = f"print({name!r}, 'gradient along a way {got:.6g}, expected {want:.6g}')"
        raise Wrong(f"the gradient of {name} along a way is {got:.6g}, expected {want:.6g}", line)


def _flat(state: Any) -> dict[str, np.ndarray]:
    import jax
    from flax import nnx

    leaves = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(state))[0]
    return {".".join(str(k.key) for k in path): np.asarray(x, np.float64) for path, x in leaves}
