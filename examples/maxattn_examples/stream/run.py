"""Stream a video with a Wan transformer: check everything, then sample and write block by block."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import maxattn as ma
from maxattn.config import ConfigErrors
from maxattn.errors import ConfigError, InputError
from maxattn.tools.writable import unwritable
from maxattn_examples.common import hosts
from maxattn_examples.common.pipeline_folder import (
    block_errors,
    block_note,
    boundary_of,
    part_of,
    pipeline_errors,
)
from maxattn_examples.sample import inputs
from maxattn_examples.sample.check import options
from maxattn_examples.sample.inputs import Paths
from maxattn_examples.sample.task import Arrays
from maxattn_examples.sample.torch_parts import Needs, without_torch
from maxattn_examples.sample.weights import check_weights, load
from maxattn_examples.wan.sampling import WanSamplingTask
from maxattn_examples.wan.torch_parts import texts

from .denoising import TRAINING_TIMES, Denoising
from .reel import Reel
from .rollout import Rollout

LINES = 10  # of progress
SWITCH = re.compile(r"\s*(\d+)\s*(?::\s*(.*\S)\s*)?", re.DOTALL)


class Scene(NamedTuple):
    """A prompt, from one block on.

    Args:
        block: the number of its first block.
        prompt: None if an embeddings file has it.
    """

    block: int
    prompt: str | None


def scenes_of(prompt: str | None, switches: Sequence[str]) -> tuple[Scene, ...]:
    """Read the scenes of a video.

    Args:
        prompt: of the first scene.
        switches: "BLOCK: PROMPT", or "BLOCK" if a file has the prompts; in ascending order.

    Raises:
        ConfigError: one has another form, or two have the same block.
    """
    scenes = [Scene(0, prompt)]
    for switch in switches:
        if (found := SWITCH.fullmatch(switch)) is None:
            rule = "it is the number of a block, and the prompt from that block on"
            raise ConfigError("--switch", repr(switch), rule, 'write such as "40: a red fox"')
        scenes.append(Scene(int(found[1]), found[2]))
    for before, after in pairwise(scenes):
        if after.block <= before.block:
            rule = f"scenes must be in order, and the one before begins with block {before.block}"
            raise ConfigError("--switch", after.block, rule, "name a later block")
    return tuple(scenes)


@dataclass(frozen=True)
class StreamRun:
    """Stream a video with a Wan transformer.

    Args:
        task: for sampling; it gives sizes, encoders and the VAE.
        scenes: the prompts, each from one block on.
        blocks: number of blocks.
        folder: the pipeline's or the transformer's; None uses random weights.
        latents: the folder for the latents of each block.
        weights: a folder whose weights are used instead.
        embeddings: a file with the text of each scene.
        prefix: clean latents to continue.
        out: the folder for the decoded video.
    """

    task: WanSamplingTask
    scenes: tuple[Scene, ...]
    blocks: int
    folder: Path | None
    latents: Path
    weights: Path | None = None
    embeddings: Path | None = None
    prefix: Path | None = None
    out: Path | None = None

    # ---- settings --------------------------------------------------------------------------------

    @property
    def settings(self) -> Any:
        """The settings of the task."""
        return self.task.settings

    @property
    def sides(self) -> tuple[int, int, int]:
        """Rows, columns and channels of a frame of latents."""
        channels, _, rows, columns = self.task.latents
        return rows, columns, channels

    @property
    def stream(self) -> ma.Stream:
        """The stream with its blocks, window and sink."""
        _, high, wide = self.task.sizes.patch_size
        rows, columns, _ = self.sides
        return self.settings.rollout.stream((rows // high) * (columns // wide))

    @property
    def denoising(self) -> Denoising:
        """The steps of a block; `sampling.sampler: flow_euler` is for models of many steps."""
        rollout, sampling = self.settings.rollout, self.settings.sampling
        return Denoising(
            rollout.denoising_steps,
            rollout.warp_steps,
            rollout.timestep_shift,
            "flow_euler" if sampling.sampler == "flow_euler" else "few_step",
            rollout.context_noise / TRAINING_TIMES,
            rollout.clean_pass,
            sampling.guidance_scale,
        )

    @property
    def weights_folder(self) -> Path | None:
        """The folder of the transformer's weights; None for random ones."""
        folder = self.weights or self.folder
        return None if folder is None else part_of(folder, self.task.part)

    # ---- the run ---------------------------------------------------------------------------------

    def run(self, mesh: jax.sharding.Mesh | None = None) -> np.ndarray:
        """Stream the video; return its latents [1, C, F, h, w].


        Raises:
            ConfigErrors: all errors, before weights are read.
        """
        if problems := [*_model_errors(self), *_file_errors(self)]:
            raise ConfigErrors(problems)
        if self.folder is not None:
            check_weights(self.task, Paths(self.folder, self.weights))
        self.latents.mkdir(parents=True, exist_ok=True)
        texts, model = self._texts(), self._model(mesh)
        how = {"seed": self.settings.sampling.seed, "options": options(self.task)}
        run = Rollout(model, self.stream, self.sides, self.denoising, **how)
        encode = nnx.jit(lambda model, text: model.encode(text))
        told = [encode(model, jnp.asarray(rows)) for rows in texts]
        reel, begun = self._begun(run, told[0])
        parts = [*begun, *self._blocks(run, reel, told)]
        latents = np.concatenate(parts, axis=2)
        if hosts.is_first():
            print(self._written("latents", latents))
            if self.out is not None and self.folder is not None:
                for path in self.task.write(self.task.pixels(self.folder, latents), self.out):
                    print(path)
        return latents

    def _model(self, mesh: Any) -> Any:
        if self.folder is None:
            print("weights   random: what is drawn shows nothing; times and memory are as ever")
            return self.task.build(mesh, nnx.Rngs(self.settings.sampling.seed))
        where = self.weights_folder
        if where is not None and (note := block_note(where)):
            print(f"weights   {note}")
        return load(self.task, Paths(self.folder, self.weights), mesh)

    def _texts(self) -> list[np.ndarray]:
        arrays = self._arrays()
        text, negative = arrays["text"], arrays.get("negative_text")
        rows = [text[i : i + 1] for i in range(len(self.scenes))]
        if self.denoising.rows == 1:
            return rows
        assert negative is not None, "it is encoded, or the file was checked for it"
        return [np.concatenate([negative[:1], row]) for row in rows]

    def _arrays(self) -> Arrays:
        if self.embeddings is not None:
            return inputs.read(self.embeddings, "--embeddings")
        sampling = self.settings.sampling
        if self.folder is None:
            shape = (len(self.scenes), sampling.text_tokens, self.task.sizes.text_dim)
            drawn = np.random.default_rng(sampling.seed).normal(size=shape).astype(np.float32)
            return {"text": drawn, "negative_text": 0 * drawn[:1]}
        prompts = {"text": [scene.prompt or "" for scene in self.scenes]}
        if self.denoising.rows > 1:
            prompts["negative_text"] = [sampling.negative_prompt or ""]
        return texts(self.folder, prompts, sampling.text_tokens, sampling.torch_device)

    def _begun(self, run: Rollout, told: Any) -> tuple[Reel, list[np.ndarray]]:
        rollout, prefix = self.settings.rollout, None
        if self.prefix is not None:
            prefix = inputs.read(self.prefix, "--prefix")["latents"].astype(np.float32)
        more = {"positions": rollout.positions}
        if rollout.cache_dtype is not None:
            more["dtype"] = rollout.cache_dtype
        made = 0 if prefix is None else prefix.shape[2]
        reel = run.begin(told, frames=self._slots(made), **more)
        print(f"rollout   {self.stream}, {reel.cache}")
        if prefix is None:
            return reel, []
        return run.prefix(reel, jnp.moveaxis(jnp.asarray(prefix), 1, -1)), [prefix]

    def _slots(self, made: int) -> int | None:
        """Count the frames of the whole video if there is no window; else return None."""
        if self.stream.window is not None:
            return None
        first = 0 if made else self.stream.first_block
        return made + first + (self.blocks - bool(first)) * self.stream.frames_per_block

    def _blocks(self, run: Rollout, reel: Reel, told: list[Any]) -> Iterator[np.ndarray]:
        """Sample the blocks; write each while the next one is computed."""
        starts = {scene.block: i for i, scene in enumerate(self.scenes) if i}
        printed, waiting = (0, time.perf_counter()), None
        for number in range(self.blocks):
            if (scene := starts.get(number)) is not None:
                reel = run.switch(reel, told[scene])
            first, (x, reel) = reel.frame, run.block(reel)
            if waiting is not None:
                yield self._kept(*waiting)
            waiting = first, x
            printed = self._progress(number + 1, *printed)
        assert waiting is not None, "at least one block is made"
        yield self._kept(*waiting)

    def _kept(self, first: int, x: Any) -> np.ndarray:
        latents = np.moveaxis(np.asarray(hosts.whole(x)), -1, 1)
        if not np.isfinite(latents).all():
            remedy = "compute in bfloat16 or float32 (model.dtype), and look at the weights"
            rule = "every number of the latents is finite"
            raise InputError("latents", f"not finite from frame {first} on", rule, remedy)
        if hosts.is_first():
            self._written(f"{first:06}", latents)
        return latents

    def _written(self, name: str, latents: np.ndarray) -> Path:
        arrays = {"latents": np.asarray(latents, np.float32)}
        return inputs.write(self.latents / f"{name}.safetensors", arrays, str(self.folder))

    def _progress(self, done: int, before: int, then: float) -> tuple[int, float]:
        """Print the progress at intervals, with the time per block since the last line."""
        if done < self.blocks and done % max(1, self.blocks // LINES):
            return before, then
        spent = (time.perf_counter() - then) / (done - before)
        number = f"{done:>{len(str(self.blocks))}}/{self.blocks}"
        print(f"block {number}  {spent:.2f} s a block", flush=True)
        return done, time.perf_counter()


# ---- refusals ------------------------------------------------------------------------------------


def _model_errors(run: StreamRun) -> Iterator[ConfigError]:
    sizes, sampling = run.task.sizes, run.settings.sampling
    of_whole_videos = ("sampling.frames", "rollout")
    if run.folder is not None:
        yield from pipeline_errors(run.folder, "wan")
    yield from (e for e in run.task.size_errors() if e.setting not in of_whole_videos)
    if sizes.in_channels > sizes.out_channels or sizes.image_dim is not None:
        rule = "blocks start from noise; an image can only be the first block"
        yield ConfigError("model.sizes", "an image-to-video model", rule, "give --prefix")
    if run.folder is not None and boundary_of(run.folder) is not None:
        rule = "a cache is for one transformer, and this pipeline has two"
        yield ConfigError("model.folder", run.folder, rule, "give a model of one")
    if sampling.sampler == "unipc":
        rule = "blocks need a few-step sampler or Euler steps"
        remedy = "leave it out for few steps, or write flow_euler"
        yield ConfigError("sampling.sampler", "unipc", rule, remedy)
    for key in ("timesteps", "sigmas", "distilled"):
        if key in sampling.model_fields_set and (value := getattr(sampling, key)) is not None:
            rule = "rollout.denoising_steps has the times of a block"
            remedy = "write the times there, with rollout.warp_steps and rollout.timestep_shift"
            yield ConfigError(f"sampling.{key}", value, rule, remedy)
    if sampling.fast is not None:
        rule = "it is for whole videos with many steps; a block has few"
        remedy = "remove sampling.fast; rollout.denoising_steps has the steps of a block"
        yield ConfigError("sampling.fast", "given", rule, remedy)
    try:
        options(run.task)
    except ConfigError as problem:
        yield problem
    if run.weights is not None and run.folder is None:
        rule = "it replaces the weights of a model, and no model is given"
        yield ConfigError("--weights", run.weights, rule, "give --model FOLDER too")
    elif (where := run.weights_folder) is not None:
        setting = "model.folder" if run.weights is None else "--weights"
        yield from block_errors(setting, where, run.settings.rollout.frames_per_block)


def _file_errors(run: StreamRun) -> Iterator[ConfigError]:
    rows = None
    if run.embeddings is not None:
        found = inputs.shapes(run.embeddings, "--embeddings")
        rows = found["text"][0] if "text" in found else 0
        guided = run.denoising.rows > 1
        forms = run.task.expected(guided)
        forms.pop("first", None)
        yield from inputs.shape_errors(found, forms, run.embeddings, "--embeddings")
    if run.blocks < 1:
        rule = "a video has at least one block"
        yield ConfigError("--blocks", run.blocks, rule, "write 1 or more")
    yield from _scene_errors(run.scenes, run.blocks, rows)
    yield from _text_errors(run)
    yield from _prefix_errors(run)
    for option, path in (("--latents", run.latents), ("--out", run.out)):
        if path is not None and (problem := unwritable(option, path, folder=True)):
            yield problem
    if run.out is not None:
        instead = "leave it out: --latents writes the latents"
        needs = Needs(("vae",), "diffusers", instead)
        yield from without_torch("--out", "decoding latents", run.folder or Path(), needs)


def _text_errors(run: StreamRun) -> Iterator[ConfigError]:
    if run.embeddings is not None:
        return
    if run.scenes[0].prompt is None:
        rule = "a prompt or an embeddings file is required"
        yield ConfigError("--prompt", "(none)", rule, "give --prompt, or --embeddings FILE")
    elif run.folder is not None:
        needs = Needs(run.task.needs_torch, "transformers", "give --embeddings FILE instead")
        yield from without_torch("--prompt", "encoding a prompt", run.folder, needs)


def _prefix_errors(run: StreamRun) -> Iterator[ConfigError]:
    if run.prefix is None:
        return
    shape = inputs.shapes(run.prefix, "--prefix", ("latents",)).get("latents", ())
    rows, columns, channels = run.sides
    if len(shape) != 5 or (*shape[:2], *shape[3:]) != (1, channels, rows, columns):
        rule = f"the file contains latents [1, {channels}, F, {rows}, {columns}]"
        remedy = "make them for this height and width"
        yield ConfigError("--prefix", f"{run.prefix}: {list(shape)}", rule, remedy)
    elif not run.stream.ends_block(shape[2]):
        rule = f"a prefix must have whole blocks of {run.stream.frames_per_block} frames"
        remedy = "cut it to whole blocks"
        yield ConfigError("--prefix", f"{run.prefix}: {shape[2]} frames", rule, remedy)


def _scene_errors(scenes: Sequence[Scene], blocks: int, rows: int | None) -> Iterator[ConfigError]:
    """Yield an error for each scene after the last block, and for missing prompts.

    Args:
        blocks: number of blocks.
        rows: number of texts in an embeddings file; None without one.
    """
    for scene in (s for s in scenes[1:] if s.block >= blocks):
        rule = f"the video has {blocks} blocks, numbered from 0"
        yield ConfigError("--switch", scene.block, rule, "raise --blocks, or leave it out")
    if rows is None and any(scene.prompt is None for scene in scenes[1:]):
        rule = "a new scene needs a prompt, or text of --embeddings"
        yield ConfigError("--switch", "a block alone", rule, 'write such as "40: a red fox"')
    if rows is not None and any(scene.prompt for scene in scenes):
        rule = "prompts come from --embeddings or from options, not from both"
        yield ConfigError("--embeddings", "given beside a prompt", rule, "write --switch BLOCK")
    if rows is not None and rows != len(scenes):
        rule = f"its text has a row for each of the {len(scenes)} scenes"
        yield ConfigError("--embeddings", f"{rows} rows", rule, "encode as many prompts")
