"""Compile a pass of Wan 14B for eight absent H200s, and list its transfers.

Needs jax's CUDA plugin, and no GPU or driver. Usage: `python -m tests.gpu.meshes_child train
KEY=VALUE ...`, or `sample`; keys of configs/wan_14b.yml. Prints JSON: the transfers of the program,
and the collectives in the plans of its attentions.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from maxattn_examples.common.compiled import FOR_SAMPLING
from maxattn_examples.train import lora
from maxattn_examples.train import step as steps
from maxattn_examples.train.step import Step, optimizer
from maxattn_examples.wan.settings import Settings
from maxattn_examples.wan.task import WanTask

from maxattn.sharding import batch_sharding, parameter_shardings
from maxattn.tools.compile.hlo import axes_of, transfers
from tests.gpu.programs_child import H200, NO_TIMING, TARGET

FRAMES, WORDS = 21, 512


class Pass:
    """A training step, or one prediction of the velocity, with a config on a mesh of eight."""

    def __init__(self, words: Sequence[str]) -> None:
        untimed = [f"{name}={value}" for name, value in NO_TIMING.items()]
        yaml = Path(__file__).parents[2] / "configs/wan_14b.yml"
        self.settings = Settings.from_yaml(yaml, list(words))
        training = self.settings.training
        options = (*training.compiler_options, *untimed)
        training = training.replace(compiler_options=options)
        self.settings = self.settings.replace(training=training)
        described: dict[str, Any] = {"topology": "1x1x8", "target_config": H200}
        gpus = topologies.get_topology_desc("", "cuda", **described).devices
        self.mesh, self.task = self.settings.make_mesh(gpus), WanTask.of(self.settings)
        said = self.settings.sampling
        self.latents = 16, FRAMES, said.height // 8, said.width // 8

    def array(self, *shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        where = batch_sharding(self.mesh, len(shape))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    def model(self) -> nnx.Module:
        """Return the model without arrays, with shardings, and with LoRA if that is trained."""
        training = self.settings.training

        def build() -> nnx.Module:
            model = self.task.build(self.mesh, nnx.Rngs(0))
            if rank := training.lora_rank:
                lora.add(model, rank, None, training.lora_targets, rngs=nnx.Rngs(1))
            return model

        model = nnx.eval_shape(build)
        state = nnx.state(model)
        nnx.update(model, jax.tree.map(placed, state, parameter_shardings(state, self.mesh)))
        return model

    def train(self) -> str:
        training, model = self.settings.training, self.model()
        parts = steps.Parts(model, training.lora_rank)
        form = parts.form(optimizer(training), False, self.mesh)
        _, fixed = steps.split(model, training.lora_rank)
        whole = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        count, of_text = training.batch_size, (WORDS, self.task.sizes.text_dim)
        batch = {"latents": self.array(count, *self.latents), "text": self.array(count, *of_text)}
        empty = {"text": jax.ShapeDtypeStruct(of_text, jnp.float32, sharding=whole)}
        step = Step(self.task, parts, fixed, empty, steps.shardings(form))
        return compiled(step._run, None, form, fixed, batch, empty)

    def sample(self) -> str:
        graph, state = nnx.split(self.model())
        (channels, *sides), sizes = self.latents, self.task.sizes
        x = self.array(2, *sides, channels, dtype=jnp.bfloat16)
        text = self.array(2, WORDS, sizes.text_dim, dtype=jnp.bfloat16)

        def velocity(state: Any, x: Any, t: Any, text: Any) -> Any:
            return nnx.merge(graph, state)(x, t, text)

        options = NO_TIMING | FOR_SAMPLING["gpu"]
        return compiled(jax.jit(velocity), options, state, x, self.array(2), text)

    def plans(self, train: bool) -> list[dict[str, Any]]:
        count = self.settings.training.batch_size if train else 2
        shapes = {"latents": (count, *self.latents)[1:], "text": (WORDS, self.task.sizes.text_dim)}
        found = self.task.plans(shapes, self.mesh).values()
        return [asdict(c) for plan in found for c in plan.collectives]


def placed(x: Any, where: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def compiled(jitted: Any, options: Any, *operands: Any) -> str:
    lowered = jitted.trace(*operands).lower(lowering_platforms=("cuda",))
    return lowered.compile(options).as_text() or ""


if __name__ == "__main__":
    with TARGET.assumed():
        kind, of = sys.argv[1], Pass(sys.argv[2:])
        text, sizes = getattr(of, kind)(), dict(of.mesh.shape)
        found = [asdict(t) | {"axes": axes_of(t, sizes)} for t in transfers(text)]
        for each in found:
            del each["groups"]
        print(json.dumps({"transfers": found, "plans": of.plans(kind == "train")}), flush=True)
    os._exit(0)  # the plugin's threads wait for a GPU
