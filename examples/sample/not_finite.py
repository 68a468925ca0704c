"""Where numbers stopped being finite: the step, the prediction and the layer."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common.scan import Around, Layers
from fast.program import Inputs, Model, take
from fast.settings import GuidanceSettings
from fast.steps import Step
from jaxtyping import Array

from maxattn.errors import InputError

RULE = "every number of the latents is finite"


def not_finite(
    model: Model, step: Step, how: GuidanceSettings, given: Inputs, steps: int
) -> InputError:
    """Return the error of a step after which the sample is not finite.

    The step is computed once more, one layer after the other.

    Args:
        model: of the step.
        step: what it computes; where it reuses layers, these are computed.
        how: predictions are mixed.
        given: the operands of the step.
        steps: of the run.
    """
    flags = jax.jit(lambda given: _by_layer(model, step, how, given))(given)
    where = f"not finite after step {int(given.i) + 1} of {steps}"
    for call, found in enumerate(map(np.asarray, flags), start=1):
        if not found.all():
            first = int(np.argmin(found))
            what = "the input of layer 0" if first == 0 else f"the output of layer {first - 1}"
            which = f" in call {call} of {len(flags)}" if len(flags) > 1 else ""
            value = f"{where}: {what}{which} is the first that is not"
            remedy = "compute in bfloat16 or float32 (model.dtype), and look at its weights"
            return InputError("latents", value, RULE, remedy)
    value = f"{where}: what layers give is, and the sum of the sampler is not"
    remedy = "lower the guidance scale, or set sampling.fast=null"
    return InputError("latents", value, RULE, remedy)


def _by_layer(model: Model, step: Step, how: GuidanceSettings, given: Inputs) -> list[Array]:
    """Return for each call whether the first layer's input and each layer's output is finite."""
    calls: list[Array] = []

    def checked(x: Array, t: Array, told: Any, around: Around | None) -> Array:
        flags: list[Array] = []

        def finite(x: Any) -> Array:
            return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(x)]).all()

        def one_by_one(layers: Layers, x: Any) -> Any:
            flags.append(finite(x))
            for number in range(layers.count):
                x = layers.run(x, range(number, number + 1))
                flags.append(finite(x))
            return x

        out = model(x, t, told, one_by_one)
        calls.append(jnp.stack(flags))
        return out

    computed = step._replace(layers="compute", keeps=False, span=None)
    take(checked, computed, how, given._replace(kept=given.kept._replace(weights=(), added=())))
    return calls
