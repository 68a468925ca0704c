"""Which steps of sampling compute, reuse and are guided, with which attention; for any model.

A model runs its layers by `ma.blocks`. `resolve` turns settings into `Steps`; your own loop calls
`forward` (or `guided`) with each of them.
"""

from maxattn.steps.layers import (
    Hook,
    Layers,
    are_stacked,
    around,
    blocks,
    count_layers,
    run_layers,
)
from maxattn.steps.resolve import resolve
from maxattn.steps.run import Added, Kept, Predictions, forward, guided, predictions
from maxattn.steps.settings import (
    AttentionSettings,
    CacheSettings,
    GuidanceSettings,
    SkipSettings,
    StepSettings,
)
from maxattn.steps.value import Mix, Step, Steps, step_needs

__all__ = [
    "Added",
    "AttentionSettings",
    "CacheSettings",
    "GuidanceSettings",
    "Hook",
    "Kept",
    "Layers",
    "Mix",
    "Predictions",
    "SkipSettings",
    "Step",
    "StepSettings",
    "Steps",
    "are_stacked",
    "around",
    "blocks",
    "count_layers",
    "forward",
    "guided",
    "predictions",
    "resolve",
    "run_layers",
    "step_needs",
]
