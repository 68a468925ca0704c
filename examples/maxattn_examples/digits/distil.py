"""Train a student whose one step replaces several guided steps of its teacher.

    x      = (1 - s) clip + s noise     at the start s of one of the student's steps
    x'     = the teacher's guided Euler steps from s to s'
    target: the velocity (x' - x) / (s' - s), without guidance

The student starts with the teacher's weights, and samples with the sigmas that it was trained on,
without guidance.

Source: Salimans and Ho 2022, https://arxiv.org/abs/2202.00512; guidance is learned as in Meng et
al. 2022, https://arxiv.org/abs/2210.03142.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxattn import weights
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import part_of
from maxattn_examples.common.shapes import Shapes
from maxattn_examples.train.task import Arrays

from .settings import Distil, Settings
from .task import ClipTask


@dataclass(frozen=True)
class DistilTask(ClipTask):
    """Train a student of few steps.

    Args:
        settings: must have `training.distil`.
        teacher: the model of `model.folder`.
    """

    teacher: Any = None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Make the task and load the teacher; raises as `found` and `load_diffusers`."""
        task = super().of(settings)
        if settings.model.folder is None:
            return task  # refused with the other settings, before training
        mesh, sampling = settings.make_mesh(), task.sampling_task()
        teacher = nnx.eval_shape(lambda: sampling.build(mesh, nnx.Rngs(0)))
        folder = part_of(Path(settings.model.folder), task.part)
        weights.load_diffusers(teacher, folder, mesh=mesh)
        return replace(task, teacher=teacher)

    @property
    def distil(self) -> Distil:
        """The settings of the student's training."""
        found = self.settings.training.distil
        assert found is not None, "the command chooses this task by it"
        return found

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield an error for each setting that a student cannot be trained or sampled with."""
        yield from super().shape_errors(shapes)
        s = self.settings.sampling
        if self.teacher is None:
            rule, remedy = "a student begins as its teacher", "give the teacher: --model FOLDER"
            yield ConfigError("model.folder", "null", rule, remedy)
        if (name := self.sampler.name) != "flow_euler":
            rule = "a student is trained for Euler steps, and sampled with them"
            yield ConfigError("sampling.sampler", name, rule, "use flow_euler")
        if s.guided:
            rule = "a student learns guidance from its teacher (training.distil.guidance_scale)"
            yield ConfigError("sampling.guidance_scale", s.guidance_scale, rule, "use 1")

    @property
    def sigmas(self) -> Float[Array, " n"]:
        """The sigmas between which the student steps."""
        times = self.sampler.schedule(self.settings.sampling.num_inference_steps).times
        return jnp.append(times / 1000.0, 0.0)

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Draw one of the student's steps for each clip; compute its end with the teacher."""
        for_clips, for_step, for_noise = jax.random.split(key, 3)
        made, more = self.made(batch, for_clips)
        clean, text = jnp.moveaxis(made["latents"], 1, -1), made["text"]
        sigmas = self.sigmas
        step = jax.random.randint(for_step, (len(clean),), 0, len(sigmas) - 1)
        begin, end = sigmas[step], sigmas[step + 1]
        s = _over(begin, clean)
        x = (1 - s) * clean + s * jax.random.normal(for_noise, clean.shape)
        frames = more["positions"][0] if more else None
        unmeant = jnp.broadcast_to(empty["text"], text.shape).astype(text.dtype)
        both = jnp.concatenate([unmeant, text])

        def one(x: Array, k: Array) -> tuple[Array, None]:
            t = begin + (end - begin) * k / self.distil.substeps
            twice = jnp.concatenate([x, x]), 1000.0 * jnp.concatenate([t, t])
            found = self.teacher(*twice, both, positions=frames).astype(jnp.float32)
            away, towards = jnp.split(found, 2)
            velocity = away + self.distil.guidance_scale * (towards - away)
            return x + _over((end - begin) / self.distil.substeps, x) * velocity, None

        after, _ = jax.lax.scan(one, x, jnp.arange(self.distil.substeps, dtype=jnp.float32))
        velocity = (after - x) / _over(end - begin, x)
        return {"mixed": x, "times": begin, "velocity": velocity, "text": text} | more


def _over(numbers: Float[Array, " B"], x: Float[Array, "B ..."]) -> Array:
    """Reshape one number per example to broadcast over the examples' axes."""
    return numbers.reshape(-1, *(1,) * (x.ndim - 1))
