"""Find the first step and part at which numbers are not finite.

The parts are, in the order of computation: the sample and the model's conditions; in each model
call the time embedding, the input of the layers, each layer's output, and the model's output; then
the guided prediction, and the sampler's sum.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.errors import InputError
from maxattn.steps import Layers, Mix, around, predictions
from maxattn_examples.samplers import step as sampler_step

if TYPE_CHECKING:
    from .loop import Inputs, Model

RULE = "every number of the latents is finite"
WEIGHTS = "compute in bfloat16 or float32 (model.dtype), and look at its weights"
GUIDANCE = "lower the guidance scale"
FAST = "sampling.fast.guidance=null"


class Part(NamedTuple):
    """A part of a step.

    Args:
        name: for the error.
        remedy: for the error, if this part is the first that is not finite.
        call: number of the model call, from 0; None outside of calls.
    """

    name: str
    remedy: str
    call: int | None = None


def not_finite(model: Model, given: Inputs, steps: int) -> InputError:
    """Return the error for a step after which the sample is not finite.

    The step is computed again, layer by layer; layers that it reused are computed.

    Args:
        given: the operands of the step.
        steps: number of steps of the run.
    """
    parts: list[Part] = []

    def flags(given: Inputs) -> Array:
        found = _parts(model, given)
        parts[:] = [part for part, _ in found]
        return jnp.stack([flag for _, flag in found])

    found = np.asarray(jax.jit(flags)(given))
    where = f"not finite after step {int(given.i) + 1} of {steps}"
    if found.all():
        if given.step.layers == "compute":
            return InputError("latents", f"{where}: each part alone is", RULE, WEIGHTS)
        value = f"{where}: each part is if it is computed, and what is reused is not"
        return InputError("latents", value, RULE, "set sampling.fast.cache=null")
    part = parts[int(np.argmin(found))]
    calls = len({x.call for x in parts} - {None})
    which = f" in call {part.call + 1} of {calls}" if part.call is not None and calls > 1 else ""
    value = f"{where}: {part.name}{which} is the first that is not"
    return InputError("latents", value, RULE, part.remedy)


def _parts(model: Model, given: Inputs) -> list[tuple[Part, Array]]:
    """Return the parts of a step in order of computation, and whether each is finite."""
    found: list[tuple[Part, Array]] = []

    def see(x: Any, *part: Any) -> None:
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(x)]
        found.append((Part(*part), jnp.stack(finite).all() if finite else jnp.array(True)))

    def call(x: Array, t: Array, name: str) -> Array:
        number = len({part.call for part, _ in found} - {None})

        def one_by_one(layers: Layers, x: Any) -> Any:
            see(
                layers.beside, "the embedding of the time, or what is added to it,", WEIGHTS, number
            )
            see(x, "the input of layer 0", WEIGHTS, number)
            for layer in range(layers.count):
                x = layers.run(x, range(layer, layer + 1))
                see(x, f"the output of layer {layer}", WEIGHTS, number)
            return x

        what = given.told[0] if name in ("without", "both") else given.told[-1]
        rows = jnp.concatenate([x, x]) if name == "both" else x
        with around(one_by_one):
            out = model(rows, jnp.broadcast_to(t, rows.shape[:1]), what)
        see(out, "the model's output, after its last layer,", WEIGHTS, number)
        return out

    see(given.state.x, "the noise", "give a file of finite numbers as --noise")
    told = "look at the embeddings that were given, and at the model's weights"
    see(given.told, "what the model makes of the prompt", told)
    two = given.step.guidance == "two" or bool(given.step.skip)
    remedy = GUIDANCE if given.step.mix == Mix() else f"{GUIDANCE}, or set {FAST}"
    whole = replace(given.step, layers="compute", keeps=0, span=None, blocks=0, weights=())

    def predict(x: Array, t: Array) -> Array:
        if not whole.predictions:
            return jnp.zeros_like(x)
        at, batched = partial(call, x, t), len(given.told) == 1
        mixed = predictions(whole, {}, at, batched=batched)[0].mixed(given.scale, whole.mix)
        see(mixed, "the mix of the predictions", remedy)
        return mixed

    state = sampler_step(given.schedule, given.i, given.state, predict)
    see(state.x, "the sum of the sampler", remedy if two else WEIGHTS)
    return found
