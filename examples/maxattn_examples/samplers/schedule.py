"""One step function for every sampler: sums of arrays, with coefficients from its schedule.

x is the sample, y the model's output for scale * x at a time, m a sum of both that is stored,
m1..mK those that earlier steps stored (the latest first), `last` the corrected sample of the step
before:

    m  = remember . (x, y)
    c  = correct  . (x, last, m, m1..mK)     the sample, corrected with the model's output for it
    x' = predict  . (c, m, m1..mK) + fresh z

A one-step sampler has K = 0 and corrects nothing. One that re-noises adds new noise z in every step
but the last; a deterministic one has no column `fresh`. The coefficients are computed in float64 on
the host; the sums are float32, whatever dtype the model computes in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.errors import TraceContextError
from jaxtyping import Array, Float, Int, UInt32

from maxattn.errors import InputError, brief
from maxattn.steps import Steps

from .with_steps import Guided, check_steps

Predict = Callable[[Array, Array], Array]
Keys = UInt32[Array, "B 2"] | UInt32[np.ndarray, "B 2"]
KIND = "threefry2x32"  # of keys; named, so that the noise does not depend on a flag of jax


class Schedule(NamedTuple):
    """The coefficients of n steps; a pytree, so it may be traced.

    Args:
        noise_scale: factor of standard normal noise in the first sample.
        times: inputs of the model, 0 (clean) to 1000 (noise), [n].
        scale: factor of the sample in the model's input, [n].
        remember: of sample and output, [n, 2].
        correct: of sample, last sample, m and m1..mK, [n, 3 + K].
        predict: of the corrected sample, m and m1..mK, [n, 2 + K].
        fresh: of new noise, [n]; None for a deterministic sampler.
    """

    noise_scale: Float[Array, ""]
    times: Float[Array, " n"]
    scale: Float[Array, " n"]
    remember: Float[Array, "n 2"]
    correct: Float[Array, "n c"]
    predict: Float[Array, "n p"]
    fresh: Float[Array, " n"] | None = None


class State(NamedTuple):
    """The state between two steps.

    Args:
        x: the sample, float32.
        last: the corrected sample of the step before, if K > 0.
        memory: m1..mK.
        keys: for each sample's new noise.
    """

    x: Array
    last: Array | None
    memory: tuple[Array, ...]
    keys: Keys | None = None


def check(shift: Any = 1.0, **counts: Any) -> None:
    """Refuse a shift that is not positive, and counts that are not positive integers.

    Args:
        counts: by name; a pair is a count and its maximum.
    """
    for name, value in counts.items():
        number, most = value if isinstance(value, tuple) else (value, None)
        if not isinstance(number, int) or not 1 <= number <= (most or math.inf):
            rule = f"it must be a whole number from 1{'' if most is None else f' to {most}'}"
            remedy = f"give 1 {'or more' if most is None else f'to {most}'}"
            raise InputError(name, brief(number), rule, remedy)
    if not 0 < shift < math.inf:
        rule = "it multiplies the odds of noise, so it must be a positive number"
        raise InputError("shift", brief(shift), rule, "give 1 for no shift")


def one_step(
    times: np.ndarray,
    predict: np.ndarray,
    scale: np.ndarray | float = 1.0,
    noise_scale: float = 1.0,
    fresh: np.ndarray | None = None,
) -> Schedule:
    """Make the schedule of a sampler without memory: x' = predict . (x, y) + fresh z.

    Args:
        times: [n].
        predict: of sample and output, [n, 2].
        scale: factor of the sample in the model's input; one number, or [n].
        noise_scale: of the first sample.
        fresh: of new noise, [n]; None for a deterministic sampler.
    """
    n = len(times)
    remember, correct = np.tile([0.0, 1.0], (n, 1)), np.tile([1.0, 0.0, 0.0], (n, 1))
    tables = times, np.broadcast_to(scale, n), remember, correct, predict
    return schedule_of(noise_scale, *tables, *(() if fresh is None else (fresh,)))


def schedule_of(noise_scale: float, *arrays: np.ndarray) -> Schedule:
    """Make a schedule from float64 arrays, in the order of its fields."""
    tables = (jnp.asarray(np.asarray(a, np.float32)) for a in arrays)
    return Schedule(jnp.float32(noise_scale), *tables)


def start(schedule: Schedule, noise: Float[Array, "B ..."], keys: Keys | None = None) -> State:
    """Return the state before the first step.

    Args:
        noise: standard normal.
        keys: from `keys_of`, if the sampler re-noises.
    """
    x = schedule.noise_scale * noise.astype(jnp.float32)
    # Each its own array: a donated buffer must not be in the state twice.
    nothing = [jnp.zeros_like(x) for _ in range(schedule.predict.shape[1] - 1)]
    kept = None if schedule.fresh is None else keys
    return State(x, nothing[0] if len(nothing) > 1 else None, tuple(nothing[1:]), kept)


def step(
    schedule: Schedule,
    i: int | Int[Array, ""],
    state: State,
    predict: Predict,
    fresh: Float[Array, "B ..."] | None = None,
) -> State:
    """Run step i.

    Args:
        i: 0 to n - 1; a traced i out of range gives NaN.
        state: from `start` or the step before.
        predict: the model: a function of sample and time.
        fresh: the step's standard normal noise, if the sampler re-noises; default drawn from the
            state's keys.

    Raises:
        InputError: i is out of range, or a sampler that re-noises has neither `fresh` nor keys.
    """
    n = len(schedule.times)
    if isinstance(i, int) and not 0 <= i < n:
        raise InputError("i", i, f"the schedule has {n} steps", f"give 0 to {n - 1}")
    how: dict[str, Any] = {"mode": "fill", "fill_value": jnp.nan, "wrap_negative_indices": False}
    row = jax.tree.map(lambda a: jnp.asarray(a).at[i].get(**how), tuple(schedule[1:]))
    return _step(Schedule(schedule.noise_scale, *row), i, state, predict, fresh)


def sample(
    predict: Callable[..., Array],
    noise: Float[Array, "B ..."],
    schedule: Schedule,
    keys: Keys | None = None,
    steps: Steps | None = None,
    scale: Any = None,
    batched: bool = False,
) -> Float[Array, "B ..."]:
    """Walk from noise to a sample, in one `lax.scan`.

    `predict` is called with a sample [B, ...] and one time, a scalar from 1000 (noise) down to 0
    (clean), whatever the model's own times are: for a model of times in [0, 1], divide by 1000. Its
    prediction y is, with sigma = t / 1000,

        flow_euler, flow_lcm, unipc   the velocity v = noise - clean,  x0 = x - sigma v
        euler, ddim, lcm              the noise in the sample, or v = a noise - s clean
                                      (`Betas.prediction_type`), with x = a clean + s noise

    A model that predicts clean - noise needs a minus sign.

    Args:
        predict: a function of sample and time (with `steps`, of the name of a prediction too:
            "with" the text, or "without"), or an NNX module. In a function, a model that runs
            its layers in `nnx.scan` is called as `nnx.clone(model)(...)`: flax lets no module of an
            outer trace run such layers in a loop.
        noise: standard normal.
        schedule: of the sampler.
        keys: from `keys_of`, for a sampler that re-noises.
        steps: from `maxattn.steps.resolve`: which steps compute, reuse and are guided; default all
            compute one prediction. Each kind of step is compiled once.
        scale: of guidance, with `steps` that are guided; default 1.
        batched: whether a guided step calls `predict` once, with the name "both", for the
            predictions of twice the rows, those without the text first; with `steps`.

    Raises:
        InputError: the sampler re-noises, and there are no keys; `steps` are of another number,
            or none of them is guided and a scale is given; or the model needs a clone.

    >>> clean = jnp.array([[1.0, 2.0]])
    >>> noise = jax.random.normal(jax.random.key(0), clean.shape)
    >>> velocity = lambda x, t: (x - clean) / (t / 1000)    # of a model that knows the answer
    >>> sample(velocity, noise, flow_euler(steps=4, shift=3.0)).round(3).tolist()
    [[1.0, 2.0]]
    """

    def call(*args: Any) -> Array:
        return (nnx.clone(predict) if isinstance(predict, nnx.Module) else predict)(*args)

    begin = start(schedule, noise, keys)
    count = len(schedule.times)
    check_steps(steps, count, scale)
    model = None
    if steps is not None:
        model = Guided(call, steps, 1.0 if scale is None else scale, batched)

    def one(carry: tuple[State, Any], at: Any) -> tuple[tuple[State, Any], None]:
        (state, kept), (i, row, own) = carry, at
        after = [kept]

        def predicted(x: Array, t: Array) -> Array:
            if model is None:
                return call(x, t)
            v, after[0] = model(own, kept, x, t)
            return v

        state = _step(Schedule(schedule.noise_scale, *row), i, state, predicted)
        return (state, after[0]), None

    try:
        carry = begin, {} if model is None else model.kept(begin.x)
        rows: Any = jnp.arange(count), tuple(schedule[1:]), None if model is None else model.rows
        return jax.lax.scan(one, carry, rows)[0][0].x
    except (ValueError, TraceContextError) as error:
        if "trace level" not in str(error):
            raise
        rule = "flax does not let a model from outside a loop run scanned layers in it"
        remedy = "call nnx.clone(model) in predict, or pass the model itself"
        raise InputError("predict", "uses a model with nnx.scan", rule, remedy) from error


def keys_of(seed: int, rows: int) -> UInt32[np.ndarray, "B 2"]:
    """Make a key for each sample of a batch.

    New noise depends only on the seed, the sample's number in the batch and the step: it is the
    same
    on any mesh, and in a batch of any size.

    Args:
        rows: number of samples.
    """
    first = jax.random.key(seed, impl=KIND)
    keys = (jax.random.key_data(jax.random.fold_in(first, row)) for row in range(rows))
    return np.stack([np.asarray(key) for key in keys])


def drawn(keys: Keys, step: Any, shape: tuple[int, ...]) -> Float[Array, "B ..."]:
    """Draw the standard normal noise of a step.

    Args:
        keys: from `keys_of`.
        step: from 0; may be traced.
        shape: of one sample.
    """

    def one(key: UInt32[Array, " 2"]) -> Float[Array, "..."]:
        of_step = jax.random.fold_in(jax.random.wrap_key_data(key, impl=KIND), step)
        return jax.random.normal(of_step, shape)

    return jax.vmap(one)(jnp.asarray(keys))


def _step(
    row: Schedule, i: Any, state: State, predict: Predict, fresh: Array | None = None
) -> State:
    y = predict(row.scale * state.x, row.times).astype(jnp.float32)
    if state.last is None:
        return State(
            _renewed(_dot(row.predict, (state.x, y)), row, i, state, fresh), None, (), state.keys
        )
    m = _dot(row.remember, (state.x, y))
    corrected = _dot(row.correct, (state.x, state.last, m, *state.memory))
    x = _renewed(_dot(row.predict, (corrected, m, *state.memory)), row, i, state, fresh)
    return State(x, corrected, (m, *state.memory[:-1]), state.keys)


def _renewed(x: Array, row: Schedule, i: Any, state: State, fresh: Array | None) -> Array:
    """Add a step's new noise if the sampler re-noises."""
    if row.fresh is None:
        return x
    if fresh is not None:
        return x + row.fresh * fresh
    if state.keys is None:
        rule = "the sampler mixes new noise into its steps, and draws it from keys"
        raise InputError("keys", None, rule, "give keys=samplers.keys_of(seed, rows)")
    return x + row.fresh * drawn(state.keys, i, x.shape[1:])


def _dot(numbers: Float[Array, " n"], arrays: Sequence[Array]) -> Array:
    total = numbers[0] * arrays[0]
    for i, array in enumerate(arrays[1:], start=1):
        total = total + numbers[i] * array
    return total
