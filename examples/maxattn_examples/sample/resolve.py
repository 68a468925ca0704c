"""Resolve what each step of a run computes, from settings and facts to one value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import maxattn as ma
from maxattn.errors import ConfigError
from maxattn.steps import Steps, resolve
from maxattn_examples.common.pipeline_folder import SECOND, boundary_of
from maxattn_examples.samplers import flow
from maxattn_examples.samplers.sampler import Sampler

from .inputs import Paths
from .settings import FastSettings, with_curve
from .task import Expert, SamplingTask
from .weights import lora_scale

FEW = 8  # with fewer steps, those that must compute leave next to nothing
Overrides = tuple[tuple[str, Any], ...]


class RunSteps(NamedTuple):
    """The steps of a run.

    Args:
        experts: the models, in the order of their steps.
        steps: what each step computes.
    """

    sampler: Sampler
    experts: tuple[Expert, ...]
    steps: Steps


def resolved(task: SamplingTask, paths: Paths | None, divides: bool = True) -> RunSteps:
    """Resolve what each step of a run computes.

    Args:
        paths: of the weights, which a curve depends on; None if no folder is known.
        divides: whether the prompts' batch rows divide evenly over the devices. If not, an expert
            without guidance is called with the negative prompt's rows too.

    Raises:
        ConfigError: `sampling.fast` does not fit the run.
    """
    sampling, sampler = task.settings.sampling, task.sampler()
    experts = task.experts(sampler.schedule(sampling.num_inference_steps).times)
    experts = tuple(x if divides else x._replace(guided=sampling.guided) for x in experts)
    given = [sampling.fast] if second_of(task) is None else [sampling.fast, second_of(task)]
    count = sampling.num_inference_steps
    for key, fast in zip(("fast", "fast_2"), given, strict=False):
        if fast is not None and fast.preset is not None and count < FEW:
            rule = f"it saves almost nothing in fewer than {FEW} steps, and the run has {count}"
            raise ConfigError(f"sampling.{key}.preset", fast.preset, rule, "leave it out")
    facts = partial(curve_facts, task, sampler, paths) if paths is not None else dict
    each = [with_curve(fast, facts) for fast in given]
    settings = each if len(each) > 1 else each[0]
    counts, guided = [x.steps for x in experts], [x.guided for x in experts]
    steps = resolve(settings, counts, task.layers, guided, setting="sampling.fast")
    return RunSteps(sampler, experts, steps)


def second_of(task: SamplingTask) -> FastSettings | None:
    """Return the second transformer's own settings, or None."""
    return getattr(task.settings.sampling, "fast_2", None)


def predicts_both(task: SamplingTask) -> bool:
    """Check whether a step computes both predictions in one call."""
    return task.settings.sampling.guidance_batched and not predicts_apart(task)


def predicts_apart(task: SamplingTask) -> bool:
    """Check whether guidance skips steps, or one prediction skips layers."""
    found = (task.settings.sampling.fast, second_of(task))
    guidance = [x.guidance for x in found if x is not None and x.guidance is not None]
    return any((how.start, how.stop) != (0, 1) or how.skip is not None for how in guidance)


def with_attention(task: SamplingTask, overrides: Overrides) -> SamplingTask:
    """Return the task with other attention settings.

    Raises:
        ConfigErrors: its own settings contradict them.
    """
    changed: Any = task
    return replace(changed, settings=task.settings.replace(**dict(overrides)))


def plans_of(
    task: SamplingTask, steps: Steps, rows: int, lengths: Mapping[str, int], mesh: Any
) -> Iterator[ma.Plan]:
    """Yield the plans of a run: as configured, then those of self-attention that steps replace.

    Args:
        rows: batch rows of a model call.
        lengths: tokens of text and image.

    Raises:
        MaxattnError: a kernel that the user named cannot run.
    """
    yield from task.plans(rows, lengths, mesh).values()
    for overrides in dict.fromkeys(step.attention for step in steps if step.attention):
        plans = with_attention(task, overrides).plans(rows, lengths, mesh)
        yield from (plan for plan in plans.values() if plan.call.role == "self")


# ---- settings that a measurement depends on --------------------------------------------------

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
        return flow.shift_of(options, sampler.tokens)
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
