"""The weights of a run: those of its task's transformers, and LoRA weights with their scale."""

from __future__ import annotations

from maxattn_examples.common.pipeline_folder import SECOND, boundary_of
from maxattn_examples.fast.run_weights import RunWeights

from .paths import Paths
from .task import SamplingTask


def weights_of_run(task: SamplingTask, paths: Paths) -> RunWeights:
    """Return which weights a run has."""
    has_two = boundary_of(paths.model) is not None
    parts = (task.part, SECOND) if has_two else (task.part,)
    given = {part: paths.lora_of(part) for part in parts}
    lora = {part: file for part, file in given.items() if file is not None}
    own = {x: paths.weights_of(x) for x in parts}
    return RunWeights(own, lora, lora_scale(task, paths), paths.lora_names)


def lora_scale(task: SamplingTask, paths: Paths) -> float:
    """Return what multiplies LoRA weights: the given scale, else that of a distilled model."""
    row = task.settings.sampling.distilled_as
    usual = 1.0 if row is None else row.lora_scale
    return usual if paths.lora_scale is None else paths.lora_scale
