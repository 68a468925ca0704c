"""A denoising step and a training step of a workload, compiled from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array
from maxattn_examples.common.compiled import sampling_options, split
from maxattn_examples.train import lora
from maxattn_examples.train.progress import Work, count
from maxattn_examples.train.settings import TrainingSettings

from maxattn.tools.xla_options import xla_options

from .workloads import Workload

SEED = 0


@dataclass(frozen=True)
class Step:
    """A compiled step.

    Args:
        work: the model, its inputs and its tokens.
        run: computes the next carry from (carry, fixed); the buffers of the carry are donated.
        start: draws the first (carry, fixed).
        forward: the model's forward pass as a function of (carry, fixed), to count operations.
        shapes: shapes of (carry, fixed).
        compiled: the program.
        facts: computes figures of its own from the step and its milliseconds.
    """

    work: Workload
    run: Callable[[Any, Any], Any]
    start: Callable[[], tuple[Any, Any]]
    forward: Callable[[Any, Any], Any]
    shapes: tuple[Any, Any]
    compiled: Any
    facts: Callable[[Step, float], dict[str, Any]] = lambda step, ms: {}

    def operations(self) -> Work:
        """Count the operations of the forward pass."""
        return count(self.forward, *self.shapes)


def denoising(work: Workload, dtype: Any, options: Iterable[str] = ()) -> Step:
    """Compile one step of sampling: a prediction, and a move of the latents along it.

    Parameters are in `dtype`. If the model has keys and values of the text, they are computed once,
    before the steps.
    """
    chosen = sampling_options(options)
    model: Any = nnx.eval_shape(lambda: work.make(dtype, dtype))
    structure, params = split(model)
    inputs = {key: jax.ShapeDtypeStruct(shape, dtype) for key, shape in work.shapes.items()}
    latents = jax.ShapeDtypeStruct(inputs["latents"].shape, jnp.float32)

    def once(params: Any, inputs: Any) -> Any:
        return work.once(structure.merge(params), inputs)

    def forward(x: Array, fixed: tuple[Any, Any]) -> Array:
        return work.predict(structure.merge(fixed[0]), x, jnp.full(x.shape[0], 500.0), fixed[1])

    def step(x: Array, fixed: tuple[Any, Any]) -> Array:
        # The latents keep unit variance: those of a random model would grow to NaN.
        return 0.98 * x - 0.02 * forward(x, fixed).astype(x.dtype)

    draw = drawing((latents, nnx.state(model), inputs))
    before = jax.jit(once).lower(params, inputs).compile()

    def start() -> tuple[Any, Any]:
        x, held, given = draw()
        leaves = tuple(jax.tree.leaves(held))
        return x, (leaves, before(leaves, given))

    fixed = (params, jax.eval_shape(once, params, inputs))
    lowered = jax.jit(step, donate_argnums=0).lower(latents, fixed)
    compiled = lowered.compile(chosen)
    return Step(work, compiled, start, forward, (latents, fixed), compiled)


def training(work: Workload, dtype: Any, options: Iterable[str] = (), lora_rank: int = 0) -> Step:
    """Compile one step of training in one program, with AdamW and float32 parameters.

    Args:
        work: the model and its inputs.
        dtype: dtype of the computation.
        options: options of XLA's compiler, as NAME=VALUE.
        lora_rank: above 0, only LoRA's parameters are trained; all others are in `dtype`.
    """
    chosen, kind = xla_options(options), nnx.LoRAParam if lora_rank else ...
    graph, trained, held = nnx.split(
        nnx.eval_shape(lambda: _made(work, dtype, lora_rank)), kind, ...
    )
    optimizer = optax.adamw(1e-5)
    inputs = {key: jax.ShapeDtypeStruct(shape, jnp.float32) for key, shape in work.shapes.items()}
    carry = (trained, jax.eval_shape(optimizer.init, trained), jax.ShapeDtypeStruct((), jnp.int32))

    def loss(trained: Any, fixed: Any, count: Array) -> Array:
        key = jax.random.fold_in(jax.random.key(SEED), count)
        return work.loss(nnx.merge(graph, trained, fixed[0]), fixed[1], key)

    def forward(carry: Any, fixed: Any) -> Array:
        return loss(carry[0], fixed, carry[2])

    def step(carry: Any, fixed: Any) -> Any:
        trained, state, count = carry
        gradient = jax.grad(loss)(trained, fixed, count)
        updates, state = optimizer.update(gradient, state, trained)
        return optax.apply_updates(trained, updates), state, count + 1

    fixed = (held, inputs)
    draw, init = drawing((trained, fixed)), jax.jit(optimizer.init).lower(trained).compile()

    def start() -> tuple[Any, Any]:
        learned, given = draw()
        return (learned, init(learned), jnp.zeros((), jnp.int32)), given

    lowered = jax.jit(step, donate_argnums=0).lower(carry, fixed)
    compiled = lowered.compile(chosen)
    return Step(work, compiled, start, forward, (carry, fixed), compiled)


def _made(work: Workload, dtype: Any, lora_rank: int) -> nnx.Module:
    model = work.make(dtype, dtype if lora_rank else jnp.float32)
    if lora_rank:
        targets = TrainingSettings().lora_targets
        lora.add(model, lora_rank, None, targets, rngs=nnx.Rngs(SEED))
    return model


# ---- random arrays -------------------------------------------------------------------------------


def drawing(shapes: Any) -> Callable[[], Any]:
    """Compile a function that draws random arrays: scales near one, matrices by their width."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    kinds = {(leaf.shape, jnp.dtype(leaf.dtype)) for _, leaf in leaves}
    with ThreadPoolExecutor() as pool:
        draw = dict(zip(kinds, pool.map(_normal, kinds), strict=True))

    def one(seed: int, path: Any, leaf: Any) -> Any:
        return draw[leaf.shape, jnp.dtype(leaf.dtype)](seed, *_spread(path, leaf))

    def start() -> Any:
        return tree.unflatten(one(i, path, leaf) for i, (path, leaf) in enumerate(leaves))

    return start


def _spread(path: Any, leaf: Any) -> tuple[float, float]:
    """Return the standard deviation and the mean of a model's array."""
    name = jax.tree_util.keystr(path)
    if "kernel" in name:
        # Before [in, out] a convolution has the axes of its window, stacked layers one axis.
        return (leaf.shape[-2] if leaf.ndim < 4 else leaf.size // leaf.shape[-1]) ** -0.5, 0.0
    small = any(part in name for part in ("scale", "bias", "table"))
    return 0.02 if small else 1.0, float("'scale'" in name)


def _normal(kind: tuple[tuple[int, ...], Any]) -> Any:
    shape, dtype = kind

    def draw(seed: int, scale: float, mean: float) -> Array:
        normal = jax.random.normal(jax.random.key(seed, impl="rbg"), shape)
        return (mean + scale * normal).astype(dtype)

    return jax.jit(draw).lower(0, 0.0, 0.0).compile()
