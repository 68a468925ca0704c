"""What is known of a run's drift: the report of examples/drift.py that it names, if it applies.

A schedule that is known before the run is compared letter by letter, however the settings say it: a
curve may have changed in its file, and a preset in its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from maxattn.errors import ConfigError
from maxattn_examples.fast.cache_settings import COMPUTE
from maxattn_examples.fast.calibrated import filled
from maxattn_examples.fast.run_weights import KEYS, Apart
from maxattn_examples.fast.steps import Planned
from maxattn_examples.samplers.sampler import Sampler

from .paths import Paths
from .planned import experts_of, predicts_both
from .run_weights import weights_of_run
from .task import SamplingTask

SETTING = "sampling.fast.measured"
UNKNOWN = "not measured on this checkpoint"


def facts_of(
    task: SamplingTask, sampler: Sampler, planned: Sequence[Planned], paths: Paths
) -> dict[str, Any]:
    """Return what the drift of a run depends on, beside its weights, prompts and noise."""
    sampling = task.settings.sampling
    experts = (x for x in experts_of(task, sampler, True) if x.steps)
    scales = [x.guidance_scale if x.guided else 1.0 for x in experts]
    settings = task.settings
    return {
        "sampler": str(replace(sampler, said_by="")).removesuffix(" ()"),
        "steps": sampling.num_inference_steps,
        "guidance": scales[0] if len(scales) == 1 else scales,
        "embedded_guidance": task.embedded_guidance,
        "latents": list(task.latents),
        "lora": weights_of_run(task, paths).lora_said(),
        "dtype": settings.model.dtype,
        "weights_dtype": sampling.weights_dtype,
        "attention": settings.kernel_for("self"),
        "cross_attention": settings.kernel_for("cross"),
        "mask_padding_tokens": settings.mask_padding_tokens,
        # A step that decides does so for both predictions, or for each.
        "guidance_batched": sampling.guided and predicts_both(task),
        "fast": _shortcuts(task, planned),
    }


def _shortcuts(task: SamplingTask, planned: Sequence[Planned]) -> dict[str, Any]:
    """Return the settings of `sampling.fast` that change what a run computes."""
    fast, letters = task.settings.sampling.fast, "".join(x.letter for x in planned)
    if fast is None:
        return {}
    other = {"preset", "measured", "cache"}
    found = fast.model_dump(mode="json", exclude=other, exclude_defaults=True)
    if (cache := filled(fast.cache)) is not None and set(letters) != {COMPUTE}:
        dynamic, kind = cache.dynamic is not None, str(cache.kind)
        kept = cache.model_dump(mode="json", include={kind} if dynamic else {"order", "layers"})
        found["cache"] = kept if dynamic else {"schedule": letters, **kept}
    return {key: value for key, value in found.items() if value}


def report_of(task: SamplingTask) -> Mapping[str, Any] | None:
    """Read the report that the settings name, if they name one.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    fast = task.settings.sampling.fast
    if fast is None or fast.measured is None:
        return None
    remedy = "name a file that examples/drift.py wrote (--report)"
    try:
        found = yaml.safe_load(Path(fast.measured).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        rule = f"it is a report in YAML, and reading it failed: {error}"
        raise ConfigError(SETTING, fast.measured, rule, remedy) from None
    if not _is_report(found):
        rule = "a report has a checkpoint, rows with name, of and drift, and maybe a floor, in"
        rule += " finite numbers from 0 up"
        raise ConfigError(SETTING, fast.measured, rule, remedy)
    return found


def _is_report(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("checkpoint"), str):
        return False
    rows, floor = found.get("rows"), found.get("floor")
    known = floor is None or _is_distance(floor)
    return (
        known
        and isinstance(rows, list)
        and all(
            isinstance(row, dict)
            and isinstance(row.get("name"), str)
            and isinstance(row.get("of"), dict)
            and isinstance(row.get("drift"), list)
            and len(row["drift"]) > 0
            and all(map(_is_distance, row["drift"]))
            for row in rows
        )
    )


def _is_distance(x: Any) -> bool:
    number = isinstance(x, float | int) and not isinstance(x, bool)
    return number and math.isfinite(x) and x >= 0


def lines(
    task: SamplingTask, sampler: Sampler, planned: Sequence[Planned], paths: Paths
) -> Iterator[str]:
    """Say how far a run with shortcuts drifts from a dense one, or why that is not known."""
    if not _shortcuts(task, planned):
        return
    report = report_of(task)
    if report is None:
        yield f"{UNKNOWN}: give a report of examples/drift.py as {SETTING}"
        return
    fast = task.settings.sampling.fast
    name = "" if fast is None else fast.measured
    if (apart := next(weights_of_run(task, paths).apart(report), None)) is not None:
        yield f"{UNKNOWN}{_other_weights(apart, name)}"
        return
    ours = facts_of(task, sampler, planned, paths)
    rows = [row for row in report["rows"] if row["of"].get("fast")]
    if not rows:
        yield f"{UNKNOWN}: {name} has no row with sampling.fast"
        return
    others = [[*_differing(ours, row["of"])] for row in rows]
    nearest = min(range(len(rows)), key=lambda i: len(others[i]))
    row = rows[nearest]
    if others[nearest]:
        keys = ", ".join(others[nearest])
        yield f"not measured so on this checkpoint: the nearest row of {name} is"
        yield f"{row['name']}, and differs in {keys}"
        return
    yield f"measured on this checkpoint: drift {_drift(row, report)}"
    plain = next((x for x in report["rows"] if x["name"] == row.get("same_cost")), None)
    if plain is not None:
        against = f"; {row['against']}" if row.get("against") else ""
        yield f"{plain['name']}, of the same cost: drift {_drift(plain, report)}{against}"
    made = [str(report[key]) for key in ("machine", "date") if key in report]
    samples = f"{len(row['drift'])} samples"
    yield f"row {row['name']} of {name}: {', '.join([samples, *made])}"


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Iterator[str]:
    for key, value in ours.items():
        if key not in theirs:
            yield f"{key} (which the report does not say)"
        elif theirs[key] != value:
            yield key


def _other_weights(apart: Apart, name: str | None) -> str:
    """Say of which weights a report is, behind the words that it is not of these."""
    if apart.was is None:
        return f": {name} has no hash of {apart.what}; write it anew with examples/drift.py"
    part = f"{apart.what} " if apart.key != KEYS[0] else ""
    if apart.found is None:
        return f": {name} is of {part}{apart.was}, and no such weights are here"
    return f", {part}{apart.found}: {name} is of {apart.was}"


def _drift(row: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    drift, floor = float(np.median(row["drift"])), report.get("floor")
    return f"{drift:.4f}" + (f", {drift / floor:.1f} x the floor" if floor else "")
