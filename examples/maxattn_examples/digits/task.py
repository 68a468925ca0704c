"""Train Wan's velocities on clips of digits, which each training step renders.

A batch has only clip numbers: devices draw and render the clips, so they wait for no data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from maxattn import weights
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import part_of
from maxattn_examples.common.shapes import Shapes
from maxattn_examples.sample.torch_parts import to_pixels
from maxattn_examples.train import forcing
from maxattn_examples.train.task import Arrays, Fixed, replaced
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.sampling import WanSamplingTask
from maxattn_examples.wan.settings import Sizes
from maxattn_examples.wan.task import WanTask

from . import scenes, torus
from .scenes import Size
from .settings import Distil, Settings
from .torus import Scans
from .words import SCENES, TORUS, Language

ENDLESS = 2**31 - 1  # clips: numbers are int32
SCALE = 4  # pixels of a file for one of a clip


@dataclass
class Clips:
    """An endless data set of clip numbers.

    Args:
        shapes: of the arrays that are rendered from a number.
        language: of the prompts.
        fingerprint: identifies the clips.
    """

    shapes: Shapes
    language: Language
    fingerprint: str

    endless: bool = True
    note: str = "clips are made on the device, each seen once"
    kind: str = "digits"
    model: str = "wan"

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"clip": np.asarray(index, np.int32)}

    @property
    def empty(self) -> dict[str, np.ndarray]:
        """The zeros that replace the text of some examples."""
        return {"text": np.zeros((self.language.length, self.language.width), np.float32)}


@dataclass(frozen=True)
class ClipTask(WanTask):
    """Train a Wan transformer on clips of digits."""

    settings: Settings  # pyright: ignore[reportIncompatibleVariableOverride]

    fixed: ClassVar[Fixed] = Fixed(
        (*WanTask.fixed.keys, "training.prompt_switches", "training.sink_distance"),
        WanTask.fixed.free,
    )

    @cached_property
    def size(self) -> Size:
        """The sizes of a clip with several digits."""
        return size_of_clips(self.settings, self.sizes)

    @cached_property
    def scans(self) -> Scans:
        """The handwritten digits to train on."""
        return Scans.of("train")

    @property
    def seen(self) -> int:
        """The number of frames of a clip that a training step uses."""
        data = self.settings.data
        return data.frames if self.settings.on_torus else data.frames_seen or self.size.frames

    @cached_property
    def places(self) -> Float[np.ndarray, "F h w P"]:
        """The channels that encode a token's place on a torus."""
        block = self.frames_per_block or self.seen
        return torus.places(self.seen, block, self.settings.data.canvas)

    def source(self) -> Clips:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the data set of clips."""
        data, seed = self.settings.data, self.settings.training.seed
        if not self.settings.on_torus:
            shape = (3, self.seen, self.size.height, self.size.width)
            name = f"digits of seed {seed}, {'x'.join(map(str, self.size))}"
            shapes = {"latents": shape, "text": (SCENES.length, SCENES.width)}
            return Clips(shapes, SCENES, name)
        frames, *sides, count = self.places.shape
        shapes = {
            "latents": (torus.SQUARE**2, frames, *sides),
            "condition": (count, frames, *sides),
        }
        name = f"a torus of seed {seed}, {data.canvas} pixels, {data.speed}, {data.start_every}"
        return Clips(shapes | {"text": (TORUS.length, TORUS.width)}, TORUS, name)

    def sampling_task(self) -> ClipSamplingTask:
        """Return the task that samples with the transformer."""
        return ClipSamplingTask(self.settings, self.sizes, Path())

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield an error if clips do not fit the transformer or the settings."""
        yield from super().shape_errors(shapes)
        data, model, wanted = self.settings.data, self.settings.model, self.channels
        for key, value in wanted.items():
            if (given := getattr(model, key)) is not None and given != value:
                rule = "clips, places and prompts need these sizes: " + ", ".join(
                    f"{name} {count}" for name, count in wanted.items()
                )
                yield ConfigError(f"model.{key}", given, rule, f"use {value}")
        if self.settings.on_torus:
            return
        least = min(self.size.height, self.size.width)
        if data.digit >= least:
            rule = f"a digit moves within frames of {self.size.height}x{self.size.width}"
            yield ConfigError("data.digit", data.digit, rule, f"use at most {least - 1}")
        if data.frames_seen > self.size.frames:
            rule, remedy = f"a clip has {self.size.frames} frames", "use 0 for all of them"
            yield ConfigError("data.frames_seen", data.frames_seen, rule, remedy)

    @property
    def channels(self) -> dict[str, int]:
        """The model's sizes that follow from clips and prompts."""
        if not self.settings.on_torus:
            return {"in_channels": 3, "out_channels": 3, "text_dim": SCENES.width}
        out = torus.SQUARE**2
        own = out + self.places.shape[-1]
        return {"in_channels": own, "out_channels": out, "text_dim": TORUS.width}

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Render clips; draw times and noise; replace some prompts by the empty one."""
        for_clips, for_noise = jax.random.split(key)
        if self.settings.on_torus:
            return self._on_torus(batch, empty, for_clips, for_noise)
        made, more = self.made(batch, for_clips)
        return super().noised(made, empty, for_noise) | more

    def made(self, batch: Arrays, key: Array) -> tuple[Arrays, Arrays]:
        """Render clips of several digits with their texts; return also positions, if any."""
        scene = scenes.draw(self.settings.training.seed, batch["clip"], self.scans, self.size)
        x = scenes.to_model(scenes.render(scene, scenes.scans_here(self.scans), self.size))
        more: Arrays = {}
        if self.seen < self.size.frames:
            frames = some_frames(key, self.size, self.seen)
            x, more["positions"] = x[:, frames], jnp.tile(frames, (len(x), 1))
        return {"latents": jnp.moveaxis(x, -1, 1), "text": SCENES.states(scene.numbers)}, more

    def _on_torus(self, batch: Arrays, empty: Arrays, key: Array, for_noise: Array) -> Arrays:
        """Render clips of one digit, with the inputs that forcing needs."""
        said, data, count = self.settings.training, self.settings.data, len(batch["clip"])
        for_texts, for_turns, for_switches = jax.random.split(key, 3)
        clip, ink = torus.draw(said.seed, batch["clip"], self.scans.first, data), self.scans.ink
        clean, other = (
            torus.to_latents(torus.render(jnp.asarray(ink)[scan], clip, data, self.seen))
            for scan in (clip.scan, clip.before)
        )
        text = TORUS.states(jnp.stack([clip.digit, clip.way], -1)[:, None])
        places = jnp.broadcast_to(self.places, (count, *self.places.shape))
        made = {"latents": clean, "text": text, "condition": places}
        made = {name: jnp.moveaxis(x, -1, 1) if x.ndim == 5 else x for name, x in made.items()}
        if said.forcing == "none":
            return super().noised(made, empty, for_noise)
        dropped = jax.random.bernoulli(for_texts, said.condition_dropout, (count,))
        stream, past = self._stream(clean.shape), None
        if said.prompt_switches:
            # Without a prompt of another digit, the visible one continues.
            share = said.prompt_switches * ~dropped
            past = torus.switched(for_switches, clean, other, share, stream)
        drawn = forcing.noised(clean, for_noise, self._noise(clean.shape), past)
        drawn |= {"text": replaced(text, empty["text"], dropped), "condition": made["condition"]}
        if (most := said.sink_distance) > 0:
            turn = data.canvas // np.gcd(data.canvas, data.speed)
            drawn["positions"] = torus.turned(for_turns, clean.shape, int(turn), most, stream)
        return drawn

    def loss(self, model: WanTransformer3D, examples: Arrays) -> Float[Array, ""]:
        """Return the mean squared error of the predicted velocity."""
        if "positions" in examples and not self.settings.on_torus:
            # All clips of a step show the same frames: one table of positions serves them.
            examples = {**examples, "positions": examples["positions"][0]}
        return super().loss(model, examples)


def some_frames(key: Array, size: Size, seen: int) -> Array:
    """Draw numbers of some frames of a clip, in ascending order."""
    return jnp.sort(jax.random.permutation(key, size.frames)[:seen])


# ---- sampling: prompts need no torch, and samples are pictures -----------------------------------


@dataclass(frozen=True)
class ClipSamplingTask(WanSamplingTask):
    """Sample clips of digits with Wan's transformer."""

    settings: Settings  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def needs_torch(self) -> tuple[str, ...]:
        """The parts that need torch: none."""
        return ()

    def encode(self, folder: Path, image: Path | None) -> Arrays:
        """Return the states of the prompts."""
        del folder, image
        s = self.settings.sampling
        prompts = {"text": s.prompt or "", "negative_text": s.negative_prompt or ""}
        arrays: Any = {name: SCENES.encode([prompt]) for name, prompt in prompts.items()}
        return arrays

    def pixels(self, folder: Path, latents: np.ndarray) -> list[np.ndarray]:
        """Return the latents, which are pixels, as videos."""
        del folder
        return list(to_pixels(np.moveaxis(latents, 1, -1)).repeat(SCALE, 2).repeat(SCALE, 3))


def size_of_clips(settings: Settings, sizes: Sizes) -> Size:
    """Return the sizes of a clip that the settings give for sampling."""
    _, frames, height, width = ClipSamplingTask(settings, sizes, Path()).latents
    return Size(frames, height, width, settings.data.digit)


# ---- a student of few steps ----------------------------------------------------------------------
# One step of the student replaces several guided steps of its teacher.
#
#     x      = (1 - s) clip + s noise     at the start s of one of the student's steps
#     x'     = the teacher's guided Euler steps from s to s'
#     target: the velocity (x' - x) / (s' - s), without guidance
#
# The student starts with the teacher's weights, and samples with the sigmas that it was trained on,
# without guidance.
#
# Source: Salimans and Ho 2022, https://arxiv.org/abs/2202.00512; guidance is learned as in Meng et
# al. 2022, https://arxiv.org/abs/2210.03142.


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
