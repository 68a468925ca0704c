"""What is learned, taken apart: parameters that change, their average, the optimizer's state, and all that stays.

Between steps everything is nested dicts of arrays, each where the mesh wants it; the module is put together inside a
step. A checkpoint holds a `State` whole and nothing else of the model: with LoRA, the changes alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from maxattn import sharding

from . import lora
from .settings import TrainingSettings
from .task import Task

Tree = Any  # nested dicts of arrays


class State(NamedTuple):
    """Hold all that a step changes.

    Args:
        step: updates taken.
        trained: the parameters that learn.
        average: their running average; empty where none is kept.
        optimizer: moments and counts.
    """

    step: jax.Array
    trained: Tree
    average: Tree
    optimizer: Tree

    @property
    def best(self) -> Tree:
        """The parameters that draw and are exported: the average, where there is one."""
        return self.average or self.trained


class Parts:
    """Know how a model is put together from the parameters that learn and those that stay.

    Args:
        model: with or without arrays.
        lora_rank: above 0, only LoRA's parameters learn.
    """

    def __init__(self, model: nnx.Module, lora_rank: int) -> None:
        kind = nnx.LoRAParam if lora_rank else nnx.Param
        self.graph, trained, fixed = nnx.split(model, kind, ...)
        self._trained, self._fixed = (jax.tree.map(_shape, state) for state in (trained, fixed))

    def model(self, trained: Tree, fixed: Tree) -> Any:
        """Put the model together."""
        return nnx.merge(
            self.graph, *(_filled(form, tree) for form, tree in zip(self._forms, (trained, fixed), strict=True))
        )

    def shardings(self, mesh: jax.sharding.Mesh | None) -> Tree:
        """Say where each parameter that learns lies on a mesh; None for one device."""
        if mesh is None:
            return None
        return nnx.to_pure_dict(sharding.parameter_shardings(self._trained, mesh))

    @property
    def _forms(self) -> tuple[Any, Any]:
        return self._trained, self._fixed


def split(model: nnx.Module, lora_rank: int) -> tuple[Tree, Tree]:
    """Return the arrays of a model: those that learn, and the rest."""
    kind = nnx.LoRAParam if lora_rank else nnx.Param
    _, trained, fixed = nnx.split(model, kind, ...)
    return nnx.to_pure_dict(trained), nnx.to_pure_dict(fixed)


def begin(trained: Tree, optimizer: optax.GradientTransformation, averaged: bool, shardings: Tree) -> State:
    """Make the state before the first step, each moment where its parameter lies.

    Args:
        trained: the parameters that learn, on their devices.
        optimizer: of the run.
        averaged: whether an average is kept.
        shardings: of the parameters; None for one device.
    """
    make = jax.jit(optimizer.init, out_shardings=_of_optimizer(optimizer, trained, shardings))
    # Copies: a donated array must not be in two places.
    average = jax.tree.map(jnp.copy, trained) if averaged else {}
    step = jnp.zeros((), jnp.int32)
    return State(_everywhere(step, shardings), trained, average, make(trained))


def places(state: State, shardings: Tree) -> Any:
    """Return the shardings of a whole state, for the step that returns it; None for one device."""
    return None if shardings is None else jax.tree.map(lambda x: x.sharding, state)


def _of_optimizer(optimizer: optax.GradientTransformation, trained: Tree, shardings: Tree) -> Any:
    if shardings is None:
        return None
    form = jax.eval_shape(optimizer.init, trained)
    whole = _whole(shardings)
    return optax.tree_utils.tree_map_params(
        optimizer, lambda _, place: place, form, shardings, transform_non_params=lambda _: whole
    )


def _everywhere(x: jax.Array, shardings: Tree) -> jax.Array:
    return x if shardings is None else jax.device_put(x, _whole(shardings))


def _whole(shardings: Tree) -> jax.sharding.NamedSharding:
    mesh = jax.tree.leaves(shardings)[0].mesh
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _filled(form: nnx.State, tree: Tree) -> nnx.State:
    state = jax.tree.map(lambda x: x, form)
    nnx.replace_by_pure_dict(state, tree)
    return state


# ---- the model before the first step ---------------------------------------------------------------------------------


def build(task: Task, mesh: jax.sharding.Mesh | None) -> nnx.Module:
    """Build the model with the weights it starts from, on the mesh, LoRA added where it is asked for.

    Weights of a folder go straight to their devices; random ones are made there.
    """
    training: TrainingSettings = task.settings.training
    model = nnx.eval_shape(lambda: task.build(mesh, nnx.Rngs(training.seed)))
    if not task.load(model, mesh):
        _randomly(task, model, mesh)
    if training.lora_rank:
        how = (training.lora_rank, training.lora_alpha, training.lora_targets)
        lora.add(model, *how, rngs=nnx.Rngs(training.seed + 1))
        sharding.place(model, mesh)
    return model


def _randomly(task: Task, model: nnx.Module, mesh: jax.sharding.Mesh | None) -> None:
    def make() -> nnx.State:
        return nnx.state(task.build(mesh, nnx.Rngs(task.settings.training.seed)))

    where = None if mesh is None else sharding.parameter_shardings(jax.eval_shape(make), mesh)
    nnx.update(model, jax.jit(make, out_shardings=where)())
