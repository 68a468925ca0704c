"""What the model of several digits learns: Wan's velocities, of clips made in the step itself.

A batch is numbers of clips alone: a device draws and renders them, so that it waits for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxattn.errors import ConfigError
from maxattn_examples.common.shapes import Shapes
from maxattn_examples.train.task import Arrays
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.task import WanTask

from . import clips, scenes, words
from .sampling_task import ClipSamplingTask, size_of_clips
from .scenes import Scans, Size
from .settings import Settings

ENDLESS = 2**31 - 1  # clips: numbers are int32


class Clips:
    """Offer numbers of clips, one after the other and without end.

    Args:
        size: of a clip.
        seen: frames of it that a step sees.
        seed: of the clips.
    """

    endless: bool = True
    note: str = "clips are made on the device, each seen once"
    kind: str = "digits"
    model: str = "wan"

    def __init__(self, size: Size, seen: int, seed: int) -> None:
        self.size, self.seen, self.seed = size, seen, seed

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"clip": np.asarray(index, np.int32)}

    @property
    def shapes(self) -> Shapes:
        """The shapes of a clip, and of its prompt's states."""
        latents = (3, self.seen, self.size.height, self.size.width)
        return {"latents": latents, "text": (words.LENGTH, words.WIDTH)}

    @property
    def empty(self) -> dict[str, np.ndarray]:
        """The states of the empty prompt."""
        return {"text": np.zeros((words.LENGTH, words.WIDTH), np.float32)}

    @property
    def fingerprint(self) -> str:
        """Which clips there are; how many frames of them are seen may change."""
        return f"digits of seed {self.seed}, {'x'.join(map(str, self.size))}"


@dataclass(frozen=True)
class ClipTask(WanTask):
    """Train a Wan transformer on clips of digits.

    Args:
        settings: of everything.
        sizes: of the model.
    """

    settings: Settings  # pyright: ignore[reportIncompatibleVariableOverride]

    @cached_property
    def size(self) -> Size:
        """The sizes of a clip."""
        return size_of_clips(self.settings, self.sizes)

    @cached_property
    def seen(self) -> int:
        """The frames of a clip that a step sees."""
        return self.settings.data.frames_seen or self.size.frames

    @cached_property
    def scans(self) -> Scans:
        """The digits that are trained on."""
        return Scans.of("train")

    def source(self) -> Clips:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Offer the clips."""
        return Clips(self.size, self.seen, self.settings.training.seed)

    def sampling_task(self) -> ClipSamplingTask:
        """Return what calls the transformer in sampling."""
        return ClipSamplingTask(self.settings, self.sizes, Path())

    def shape_errors(self, shapes: Shapes) -> Iterable[ConfigError]:
        """Yield clips that the transformer cannot take, and settings that fit no clips."""
        yield from super().shape_errors(shapes)
        yield from clip_errors(self.settings, self.size)

    def made(self, batch: Arrays, key: Array) -> tuple[Arrays, Arrays]:
        """Make the clips of a batch, and their texts; return beside them positions, if any."""
        scene = scenes.draw(self.settings.training.seed, batch["clip"], self.scans, self.size)
        x = clips.to_model(clips.render(scene, clips.scans_here(self.scans), self.size))
        more: Arrays = {}
        if self.seen < self.size.frames:
            frames = some_frames(key, self.size, self.seen)
            x, more["positions"] = x[:, frames], jnp.tile(frames, (len(x), 1))
        return {"latents": jnp.moveaxis(x, -1, 1), "text": words.states(scene.numbers)}, more

    def noised(self, batch: Arrays, empty: Arrays, key: Array) -> Arrays:
        """Make the clips; draw times and noise; replace some prompts by the empty one."""
        for_frames, for_noise = jax.random.split(key)
        made, more = self.made(batch, for_frames)
        return super().noised(made, empty, for_noise) | more

    def loss(self, model: WanTransformer3D, examples: Arrays) -> Float[Array, ""]:
        """Return the mean squared error of the predicted velocity."""
        at = 1000.0 * examples["times"]
        # All clips of a step show the same frames: one table of positions serves them.
        frames = examples["positions"][0] if "positions" in examples else None
        velocity = model(examples["mixed"], at, examples["text"], positions=frames)
        return jnp.mean((velocity.astype(jnp.float32) - examples["velocity"]) ** 2)


def some_frames(key: Array, size: Size, seen: int) -> Array:
    """Draw the numbers of some frames of a clip, in their order."""
    return jnp.sort(jax.random.permutation(key, size.frames)[:seen])


def clip_errors(settings: Settings, size: Size) -> Iterable[ConfigError]:
    """Yield settings of clips that contradict each other."""
    data, least = settings.data, min(size.height, size.width)
    if data.digit >= least:
        rule = f"a digit moves within frames of {size.height}x{size.width}"
        yield ConfigError("data.digit", data.digit, rule, f"use at most {least - 1}")
    if data.frames_seen > size.frames:
        rule, remedy = f"a clip has {size.frames} frames", "use 0 for all of them"
        yield ConfigError("data.frames_seen", data.frames_seen, rule, remedy)
    if (how := settings.training.forcing) != "none":
        rule = "the frames of these clips see each other"
        yield ConfigError("training.forcing", how, rule, "use none")
    wanted = {"in_channels": 3, "out_channels": 3, "text_dim": words.WIDTH}
    for key, value in wanted.items():
        if (given := getattr(settings.model, key)) is not None and given != value:
            rule = f"clips have 3 colours, and prompts states of {words.WIDTH} numbers"
            yield ConfigError(f"model.{key}", given, rule, f"use {value}")
