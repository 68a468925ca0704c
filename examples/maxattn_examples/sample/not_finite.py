"""Where numbers stopped being finite: the step, and the part of it, in the order in which they run.

A step's parts are its sample, what the model is told, and then in each call of the model the
embedding of the time, the input of its layers, each layer's output, and its own output; at the end
the mix of its predictions, and the sampler's sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxattn.errors import InputError
from maxattn_examples.common.scan import Around, Layers
from maxattn_examples.fast.program import Inputs, Model, take
from maxattn_examples.fast.settings import GuidanceSettings
from maxattn_examples.fast.steps import Step

RULE = "every number of the latents is finite"
WEIGHTS = "compute in bfloat16 or float32 (model.dtype), and look at its weights"
GUIDANCE = "lower the guidance scale"
FAST = "sampling.fast.guidance=null"


class Part(NamedTuple):
    """A part of a step.

    Args:
        name: in an error.
        remedy: if it is the first that is not finite.
        call: of the model, from 0; None if it is not of one.
    """

    name: str
    remedy: str
    call: int | None = None


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
    parts: list[Part] = []

    def flags(given: Inputs) -> Array:
        found = _parts(model, step, how, given)
        parts[:] = [part for part, _ in found]
        return jnp.stack([flag for _, flag in found])

    found = np.asarray(jax.jit(flags)(given))
    where = f"not finite after step {int(given.i) + 1} of {steps}"
    if found.all():
        if step.layers == "compute":
            return InputError("latents", f"{where}: each part alone is", RULE, WEIGHTS)
        value = f"{where}: each part is if it is computed, and what is reused is not"
        return InputError("latents", value, RULE, "set sampling.fast.cache=null")
    part = parts[int(np.argmin(found))]
    calls = len({x.call for x in parts} - {None})
    which = f" in call {part.call + 1} of {calls}" if part.call is not None and calls > 1 else ""
    value = f"{where}: {part.name}{which} is the first that is not"
    return InputError("latents", value, RULE, part.remedy)


def _parts(
    model: Model, step: Step, how: GuidanceSettings, given: Inputs
) -> list[tuple[Part, Array]]:
    """Return the parts of a step in the order in which they run, and whether each is finite."""
    found: list[tuple[Part, Array]] = []

    def see(x: Any, *part: Any) -> None:
        finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(x)]
        found.append((Part(*part), jnp.stack(finite).all() if finite else jnp.array(True)))

    def checked(x: Array, t: Array, told: Any, around: Around | None) -> Array:
        call = len({part.call for part, _ in found} - {None})

        def one_by_one(layers: Layers, x: Any) -> Any:
            see(layers.beside, "the embedding of the time, or what is added to it,", WEIGHTS, call)
            see(x, "the input of layer 0", WEIGHTS, call)
            for number in range(layers.count):
                x = layers.run(x, range(number, number + 1))
                see(x, f"the output of layer {number}", WEIGHTS, call)
            return x

        out = model(x, t, told, one_by_one)
        see(out, "the model's output, after its last layer,", WEIGHTS, call)
        return out

    see(given.state.x, "the noise", "give a file of finite numbers as --noise")
    told = "look at the embeddings that were given, and at the model's weights"
    see(given.told, "what the model makes of the prompt", told)
    two = step.guidance in ("guided", "gate") or bool(step.skip)
    remedy = GUIDANCE if how == GuidanceSettings() else f"{GUIDANCE}, or set {FAST}"
    computed = step._replace(layers="compute", keeps=False, span=None)
    kept = given.kept._replace(weights=(), added=())
    state, _ = take(
        checked,
        computed,
        how,
        given._replace(kept=kept),
        lambda mixed: see(mixed, "the mix of the predictions", remedy),
    )
    see(state.x, "the sum of the sampler", remedy if two else WEIGHTS)
    return found
