"""The settings that a measurement depends on: all weights, sampler, sizes, dtypes, kernels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from maxattn_examples.common.pipeline_folder import SECOND, boundary_of
from maxattn_examples.samplers import flow_euler
from maxattn_examples.samplers.sampler import Sampler

from .files import Paths
from .task import SamplingTask
from .weights import lora_scale

PIECE, PIECES = 2**12, 16  # bytes, and how many of a large tensor are read


def weights_facts(task: SamplingTask, paths: Paths) -> dict[str, Any]:
    """Return the hash of each transformer and of the LoRA weights merged into it."""
    has_two = boundary_of(paths.model) is not None
    found: dict[str, Any] = {}
    lora = []
    for number, part in enumerate((task.part, SECOND) if has_two else (task.part,)):
        key = "checkpoint" + (f"_{number + 1}" if number else "")
        found[key] = checkpoint_hash(paths.weights_of(part))
        if (file := paths.lora_of(part)) is not None:
            names = paths.lora_names
            named = (
                "" if names is None else f", names {sha256(names.read_bytes()).hexdigest()[:16]}"
            )
            lora.append(f"{part}: {checkpoint_hash(file)} x {lora_scale(task, paths):g}{named}")
    return found | {"lora": lora}


def curve_facts(task: SamplingTask, sampler: Sampler, paths: Paths) -> dict[str, Any]:
    """Return the facts that a MagCache curve depends on."""
    sizes = {key: x for key, x in vars(task.sizes).items() if isinstance(x, int)}
    experts = 1 if boundary_of(paths.model) is None else 2
    return {
        **sizes,
        "experts": experts,
        "sampler": sampler.name,
        "shift": shift_of(sampler),
        "guidance": task.settings.sampling.cfg_scale,
        "embedded_guidance": task.embedded_guidance,
        "latents": list(task.latents),
        "dtype": task.settings.model.dtype,
        **weights_facts(task, paths),
    }


def run_facts(task: SamplingTask, sampler: Sampler, paths: Paths) -> dict[str, Any]:
    """Return the facts that the drift of a run depends on, without prompts and noise."""
    settings, sampling = task.settings, task.settings.sampling
    fast = sampling.fast
    return {
        **curve_facts(task, sampler, paths),
        "sampler": str(replace(sampler, said_by="")).removesuffix(" ()"),
        "steps": sampling.num_inference_steps,
        "weights_dtype": sampling.weights_dtype,
        "attention": settings.kernel_for("self"),
        "cross_attention": settings.kernel_for("cross"),
        "mask_padding_tokens": settings.mask_padding_tokens,
        "guidance_batched": sampling.guidance_batched,
        "samples": sampling.per_prompt,
        "fast": {} if fast is None else fast.model_dump(mode="json", exclude_defaults=True),
    }


def shift_of(sampler: Sampler) -> float | None:
    """Return the shift of a sampler's times, or None."""
    options = sampler.options
    if sampler.family == "even_flow":
        return flow_euler.shift_of(options, sampler.tokens)
    return options.get("flow_shift", options.get("shift"))


def checkpoint_hash(path: Path) -> str | None:
    """Hash the weights of a folder or file; None if there are none.

    The hash covers small tensors whole, and pieces spread over large ones.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not all(file.is_file() for file in files) or not files:
        return None
    found = sha256()
    for file in files:
        with file.open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little"))
            found.update(header)
            for place in _places(json.loads(header), opened.tell()):
                opened.seek(place)
                found.update(opened.read(PIECE))
    return found.hexdigest()[:16]


def _places(header: dict[str, Any], start: int) -> Iterator[int]:
    """Yield the offsets in the file at which the hashed pieces of each tensor begin."""
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            count = min(PIECES, -(-(end - begin) // PIECE))
            spread = np.linspace(begin, max(begin, end - PIECE), count)
            yield from (start + spread.astype(int)).tolist()
