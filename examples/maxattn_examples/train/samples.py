"""Sample during training: with the first examples' texts, always from the same noise.

Each time writes a picture and the latents, which a VAE can decode later, to output_dir/samples.
Latents of digits are drawn as digits; for others the picture shows every channel in grey, frame by
frame.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from PIL import Image

from maxattn import sharding
from maxattn.steps import resolve
from maxattn.tools.xla_options import xla_options
from maxattn.weights.replacing import replacing
from maxattn_examples.common import hosts, pictures
from maxattn_examples.sample import inputs
from maxattn_examples.samplers import keys_of, sample

from .step import Parts, Tree
from .task import Examples, Task

Latents = Float[np.ndarray, "n C F h w"]
FRAMES = 6  # of a video in a picture of channels, evenly spaced
GAP = 4  # pixels between pictures


class Samples:
    """Draw a few samples, and write their picture and latents.

    Args:
        task: its settings give number, sampler and guidance.
        source: the data; its first examples are the conditions.
    """

    def __init__(
        self, task: Task, source: Examples, parts: Parts, mesh: jax.sharding.Mesh | None
    ) -> None:
        self.task, self.source, self.parts = task, source, parts
        self.sampling = task.settings.sampling
        self.count = min(self.sampling.count, len(source))
        given = self._given(sharding.ways("B", sharding.mesh_shape(mesh)))
        latents = given.pop("latents").shape
        noise = jax.random.normal(jax.random.key(self.sampling.seed), latents)
        self.noise = jnp.moveaxis(noise, 1, -1)
        self.keys = keys_of(self.sampling.seed, latents[0])
        self.told = self._with_empty(given) if self.guided else given
        sampler = task.sampler.of_tokens(task.tokens(source.shapes))
        self.schedule = sampler.schedule(self.sampling.num_inference_steps)
        options = xla_options(self.sampling.compiler_options, "sampling.compiler_options")
        self._draw = jax.jit(self._sampled, compiler_options=options)

    @property
    def guided(self) -> bool:
        """Whether sampling also calls the model with the empty text."""
        return self.sampling.guided

    def _given(self, ways: int) -> dict[str, np.ndarray]:
        """Stack the first examples, padded to a number that divides over the devices."""
        rows = -(-self.count // ways) * ways  # padding rows are drawn and discarded
        examples = [self.source[i % self.count] for i in range(rows)]
        return {name: np.stack([one[name] for one in examples]) for name in self.source.shapes}

    def _with_empty(self, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Put the empty text's batch rows before those of the texts."""
        empty = self.source.empty

        def both(name: str, x: np.ndarray) -> np.ndarray:
            without = np.broadcast_to(empty.get(name, x), x.shape).astype(x.dtype)
            return np.concatenate([without, x])

        return {name: both(name, x) for name, x in given.items()}

    def _sampled(self, trained: Tree, fixed: Tree, told: Any, noise: Any) -> jax.Array:
        task = self.task.sampling_task()
        known = task.told(self.parts.model(trained, fixed), told)

        def predict(x: jax.Array, t: jax.Array, which: str) -> jax.Array:
            x = jnp.concatenate([x, x]) if which == "both" else x
            # A module of an outer trace may not be used in that of the scan over steps, so the
            # model is put together anew.
            model = self.parts.model(trained, fixed)
            return task.predict(model, x, jnp.broadcast_to(t, x.shape[:1]), known)

        steps = resolve(None, len(self.schedule.times), task.layers, self.guided)
        scale = self.sampling.cfg_scale if self.guided else None
        return sample(predict, noise, self.schedule, self.keys, steps, scale, batched=True)

    def __call__(self, trained: Tree, fixed: Tree, step: int) -> Path:
        """Sample with these parameters; return the path of the picture."""
        drawn = hosts.whole(self._draw(trained, fixed, self.told, self.noise))[: self.count]
        path = Path(self.task.training.output_dir) / "samples" / f"{step:07}.png"
        if hosts.is_first():
            self._write(np.moveaxis(drawn, -1, 1), path)
        return path

    def _write(self, latents: np.ndarray, path: Path) -> None:
        file, source = path.with_suffix(".safetensors"), self.source
        inputs.write(file, {"latents": latents}, source.model, source=source.kind)
        videos = latents if latents.ndim == 5 else latents[:, :, None]
        if source.kind == "digits":
            labels = [f"example {i}" for i in range(self.count)]
            pictures.contact_sheet(
                np.stack([pictures.from_latents(v) for v in videos]), labels, path
            )
        else:
            with replacing(path) as beside:
                Image.fromarray(channels(videos)).save(beside)


def channels(videos: Latents) -> np.ndarray:
    """Lay out latents in grey: a line per video, with some of its frames and all channels of each.

    Black to white spans three standard deviations of a channel over all videos, either way.
    """
    _, count, frames, *_ = videos.shape
    across = next(n for n in range(int(count**0.5), 0, -1) if count % n == 0)
    chosen = np.unique(np.linspace(0, frames - 1, min(FRAMES, frames)).round().astype(int))
    rows = []
    for video in _grey(videos):
        tiles = (_tiled(video[:, frame], across) for frame in chosen)
        framed = [np.pad(tile, GAP // 2, constant_values=255) for tile in tiles]
        rows.append(np.concatenate(framed, axis=1))
    return np.concatenate(rows)


def _grey(videos: Latents) -> np.ndarray:
    mean, spread = (f(axis=(0, 2, 3, 4), keepdims=True) for f in (videos.mean, videos.std))
    return np.clip(127.5 + 42.5 * (videos - mean) / (spread + 1e-6), 0, 255).astype(np.uint8)


def _tiled(image: np.ndarray, across: int) -> np.ndarray:
    c, h, w = image.shape
    tiles = image.reshape(c // across, across, h, w).swapaxes(1, 2)
    return tiles.reshape(c // across * h, across * w)
