"""Train Wan's velocities on clips of digits, which each training step renders.

A batch has only clip numbers: devices draw and render the clips, so they wait for no data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxattn.errors import ConfigError
from maxattn_examples.common.shapes import Shapes
from maxattn_examples.sample import media
from maxattn_examples.train import forcing
from maxattn_examples.train.task import Arrays, Fixed, replaced
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.sampling import WanSamplingTask
from maxattn_examples.wan.sizes import Sizes
from maxattn_examples.wan.task import WanTask

from . import scenes, torus
from .scenes import Size
from .settings import Settings
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
        return list(media.to_pixels(np.moveaxis(latents, 1, -1)).repeat(SCALE, 2).repeat(SCALE, 3))


def size_of_clips(settings: Settings, sizes: Sizes) -> Size:
    """Return the sizes of a clip that the settings give for sampling."""
    _, frames, height, width = ClipSamplingTask(settings, sizes, Path()).latents
    return Size(frames, height, width, settings.data.digit)
