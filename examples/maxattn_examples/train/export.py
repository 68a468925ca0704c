"""Write trained weights in diffusers' format: the model's folder, or the LoRA's file."""

from __future__ import annotations

from pathlib import Path

import jax
from flax import nnx

from maxattn import weights
from maxattn.weights.replacing import replacing
from maxattn_examples.common import hosts
from maxattn_examples.common.model_config import saying
from maxattn_examples.common.pipeline_folder import FIRST, SECOND, read_mapping, write_json
from maxattn_examples.samplers.sampler import CLASSES

from . import lora
from .task import Task

LORA_FILE = "pytorch_lora_weights.safetensors"
# diffusers reads those of a second transformer under the first one's names (its argument
# load_into_transformer_2): only the file's name differs.
SECOND_LORA_FILE = "pytorch_lora_weights_2.safetensors"
CONFIG = "config.json"


def export(task: Task, model: nnx.Module, folder: Path) -> Path | None:
    """Write a model to `folder`, or with LoRA only the LoRA file.

    Returns:
        The folder or file; None in a run of several processes, each of which has a part of every
        parameter.
    """
    if task.training.lora_rank:
        name = SECOND_LORA_FILE if task.part == SECOND else LORA_FILE
        return _lora(task, model, folder / name)
    if jax.process_count() > 1:
        return None
    whole = folder / task.part
    if task.training.export_dtype is not None:
        model = _stored(model, task.training.export_dtype)
    weights.save_diffusers(model, whole)
    _config(task, whole)
    if task.sampler is not None:  # the folder is sampled as the model was trained
        said = {"_class_name": CLASSES[task.sampler.name], **task.sampler.options}
        write_json(folder / "scheduler" / "scheduler_config.json", said)
    return whole


def _stored(model: nnx.Module, dtype: str) -> nnx.Module:
    """Return the model with matrices in this dtype; norms, biases and tables keep theirs."""
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    flat = [
        (path, param.replace(param.get_value().astype(dtype)) if path[-1] == "kernel" else param)
        for path, param in nnx.to_flat_state(params)
    ]
    return nnx.merge(graph, nnx.from_flat_state(flat), rest)


def _lora(task: Task, model: nnx.Module, path: Path) -> Path:
    from safetensors.numpy import save_file

    prefix = FIRST if task.part == SECOND else task.part
    tensors = lora.to_diffusers(model, f"{prefix}.")  # every process takes part in gathering
    if hosts.is_first():
        with replacing(path) as beside:
            save_file(tensors, beside, metadata={"format": "pt"})
    return path


def _config(task: Task, whole: Path) -> None:
    """Write config.json: the initial folder's values, the sizes, and the frames per block."""
    given, sizes = task.folder, task.sizes
    if given is not None:
        said = read_mapping(given / CONFIG)
    else:
        said = {} if sizes is None else sizes.config()
    write_json(whole / CONFIG, saying(said, task.frames_per_block))
