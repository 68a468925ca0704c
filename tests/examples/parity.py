"""Compare a whole model that has diffusers' weights with diffusers' output and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file

from maxattn import weights
from tests.closeness import hold
from tests.weights.test_diffusers import FOLDER

Tensors = dict[str, np.ndarray]


def fixture(case: str) -> Tensors:
    return load_file(FOLDER / f"diffusers_{case}.safetensors")


def part(tensors: Tensors, prefix: str) -> Tensors:
    return {
        key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)
    }


def channels_last(x: np.ndarray) -> jax.Array:
    return jnp.moveaxis(jnp.asarray(x), 1, -1)


def channels_second(x: Any) -> np.ndarray:
    return np.moveaxis(np.asarray(x), -1, 1)


def compare(
    model: nnx.Module,
    theirs: Tensors,
    call: Callable[[Any, jax.Array, dict[str, jax.Array]], jax.Array],
) -> None:
    """Compare output (2e-5 of its scale) and all gradients (1e-4 of each one's).

    A gradient's scale is at least a ten-thousandth of the largest gradient's: below that, float32
    has
    too few digits to compare, and how few depends on the processor.

    Args:
        model: with their weights.
        theirs: a fixture.
        call: calls the model on channels-last latents and the other inputs.
    """
    given = {key: jnp.asarray(value) for key, value in part(theirs, "in.").items()}
    dout = channels_last(theirs["dout"])

    @nnx.jit
    def both(model: nnx.Module, x: jax.Array):
        def loss(model: nnx.Module, x: jax.Array):
            out = call(model, x, given)
            return jnp.sum(out * dout), out

        (_, out), grads = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(model, x)
        return out, grads

    out, (by_weights, by_x) = both(model, channels_last(theirs["in.x"]))
    hold("output", {"": channels_second(out)}, {"": theirs["out"]}, 2e-5)
    nnx.update(model, by_weights)  # so that gradients come out under diffusers' names, too
    gradients = weights.to_diffusers(model) | {"in.x": channels_second(by_x)}
    wanted = part(theirs, "grad.")
    largest = max(np.abs(x).max() for x in wanted.values())
    hold("gradients", gradients, wanted, 1e-4, least=max(1e-3, 1e-4 * largest))
