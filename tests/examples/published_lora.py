"""LoRA weights under published names, merged and compared with sums in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from maxattn import weights
from maxattn.weights.layer_names import names_of
from maxattn.weights.names import entries

SCALE = 0.7
# The names of a layer: (A, B, alpha).
Names = tuple[str, str, str]


def filled(shapes: nnx.Module) -> Any:
    """Give a model without arrays random weights, in place."""
    rng = np.random.default_rng(0)
    given = {e.name: rng.normal(size=e.shape).astype(np.float32) for e in entries(shapes)}
    weights.load_diffusers(shapes, given)
    return shapes


def drawn(
    before: Mapping[str, np.ndarray], names: Mapping[str, Names], rank: int, alpha: float | None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return LoRA weights, and the merged weights in float64.

    `names` maps diffusers' layer names; an alpha of None is the rank, and is not written.
    """
    given, want = {}, {}
    for seed, (layer, (name_a, name_b, name_alpha)) in enumerate(names.items()):
        kernel, rng = before[f"{layer}.weight"], np.random.default_rng(seed)
        out, *inner = kernel.shape
        a = given[name_a] = rng.normal(size=(rank, *inner)).astype(np.float32)
        ones = (1,) * (len(inner) - 1)
        b = given[name_b] = rng.normal(size=(out, rank, *ones)).astype(np.float32)
        if alpha is not None:
            given[name_alpha] = np.float32(alpha)
        down, up = (x.astype(np.float64).reshape(len(x), -1) for x in (a, b))
        change = SCALE * (alpha or rank) / rank * (up @ down)
        want[f"{layer}.weight"] = kernel.astype(np.float64) + change.reshape(kernel.shape)
    return given, want


def check(model: nnx.Module, before: Mapping[str, Any], want: Mapping[str, Any]) -> None:
    """Check that the weights in `want` have these values, and that all others are unchanged."""
    for name, array in weights.to_diffusers(model).items():
        if name in want:
            np.testing.assert_allclose(array, want[name], rtol=2e-6, atol=2e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(array, before[name], err_msg=name)


def check_names(model: nnx.Module, originals: Callable[[set[str]], Any]) -> set[str]:
    """Check that no name belongs to two layers; return the layers without a name of their own."""
    names = names_of(model)
    own = {entry.removesuffix(".weight").removesuffix(".bias") for entry in names.entries}
    theirs = originals(own)
    assert len(set(theirs.values())) == len(theirs)
    for layer, name in [*theirs.items(), *((layer, layer) for layer in own)]:
        assert names.layers[name] == names.layers[name.replace(".", "_")] == layer
    return own - theirs.keys()
