"""Refuses a streaming run that cannot work, before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from maxattn.errors import ConfigError
from maxattn.tools.writable import unwritable
from maxattn_examples.common.model_config import block_errors
from maxattn_examples.common.pipeline_folder import boundary_of, pipeline_errors
from maxattn_examples.sample import files
from maxattn_examples.sample.check import options
from maxattn_examples.sample.torch_parts import Needs, without_torch

if TYPE_CHECKING:
    from .run import Scene, StreamRun


def stream_errors(run: StreamRun) -> Iterator[ConfigError]:
    """Yield everything that cannot work: model, scenes, files and folders."""
    yield from _model_errors(run)
    yield from _file_errors(run)


def _model_errors(run: StreamRun) -> Iterator[ConfigError]:
    sizes, sampling = run.task.sizes, run.settings.sampling
    of_whole_videos = ("sampling.frames", "rollout")
    if run.folder is not None:
        yield from pipeline_errors(run.folder, "wan")
    yield from (e for e in run.task.size_errors() if e.setting not in of_whole_videos)
    if sizes.in_channels > sizes.out_channels or sizes.image_dim is not None:
        rule = "a block is made of noise alone; an image is the first block of a video"
        yield ConfigError("model.sizes", "an image-to-video model", rule, "give --prefix")
    if run.folder is not None and boundary_of(run.folder) is not None:
        rule = "one cache has the keys of one transformer, and this pipeline has two"
        yield ConfigError("model.folder", run.folder, rule, "give a model of one")
    if sampling.sampler == "unipc":
        rule = "a block is made in few steps, or in Euler steps"
        remedy = "leave it out for few steps, or write flow_euler"
        yield ConfigError("sampling.sampler", "unipc", rule, remedy)
    for key in ("timesteps", "sigmas", "distilled"):
        if key in sampling.model_fields_set and (value := getattr(sampling, key)) is not None:
            rule = "a block takes its steps at rollout.denoising_steps"
            remedy = "write the times there, with rollout.warp_steps and rollout.timestep_shift"
            yield ConfigError(f"sampling.{key}", value, rule, remedy)
    if sampling.fast is not None:
        rule = "it is of whole videos, whose steps are many; a block is made in few steps"
        remedy = "remove sampling.fast; rollout.denoising_steps says the steps of a block"
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
        found = files.shapes(run.embeddings, "--embeddings")
        rows = found["text"][0] if "text" in found else 0
        guided = run.denoising.rows > 1
        forms = run.task.expected(guided)
        forms.pop("first", None)
        yield from files.shape_errors(found, forms, run.embeddings, "--embeddings")
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
    shape = files.shapes(run.prefix, "--prefix", ("latents",)).get("latents", ())
    rows, columns, channels = run.sides
    if len(shape) != 5 or (*shape[:2], *shape[3:]) != (1, channels, rows, columns):
        rule = f"the file contains latents [1, {channels}, F, {rows}, {columns}]"
        remedy = "make them for this height and width"
        yield ConfigError("--prefix", f"{run.prefix}: {list(shape)}", rule, remedy)
    elif not run.stream.ends_block(shape[2]):
        rule = f"a video goes on behind whole blocks of {run.stream.frames_per_block} frames"
        remedy = "cut it to whole blocks"
        yield ConfigError("--prefix", f"{run.prefix}: {shape[2]} frames", rule, remedy)


def _scene_errors(scenes: Sequence[Scene], blocks: int, rows: int | None) -> Iterator[ConfigError]:
    """Yield scenes that are never shown, and those without a prompt.

    Args:
        scenes: of the video.
        blocks: that are made.
        rows: of text in an embeddings file; None without one.
    """
    for scene in (s for s in scenes[1:] if s.block >= blocks):
        rule = f"the {blocks} blocks that are made are numbered from 0"
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
