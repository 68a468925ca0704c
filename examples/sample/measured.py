"""What is known of a run's drift: the report of examples/drift.py that it names, if it applies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fast.curves import checkpoint_hash
from samplers.read import Sampler

from maxattn.errors import ConfigError

from .paths import Paths
from .task import SamplingTask

SETTING = "sampling.fast.measured"
UNKNOWN = "not measured on this checkpoint"


def facts_of(task: SamplingTask, sampler: Sampler, paths: Paths) -> dict[str, Any]:
    """Return what the drift of a run depends on, beside its weights, prompts and noise."""
    sampling = task.settings.sampling
    lora = [checkpoint_hash(path) for path in (paths.lora, paths.lora_2) if path is not None]
    fast = {} if sampling.fast is None else sampling.fast.model_dump(
        mode="json", exclude={"preset", "measured"}, exclude_defaults=True
    )  # fmt: skip
    return {
        "sampler": str(sampler),
        "steps": sampling.num_inference_steps,
        "guidance": sampling.cfg_scale if sampling.guided else 1.0,
        "latents": list(task.latents),
        "lora": lora and [*lora, paths.lora_scale],
        "fast": fast,
    }


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
        rule = "a report has a checkpoint, and rows with name, of and drift"
        raise ConfigError(SETTING, fast.measured, rule, remedy)
    return found


def _is_report(found: Any) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("checkpoint"), str):
        return False
    rows = found.get("rows")
    return isinstance(rows, list) and all(
        isinstance(row, dict)
        and isinstance(row.get("name"), str)
        and isinstance(row.get("of"), dict)
        and isinstance(row.get("drift"), list)
        and len(row["drift"]) > 0
        and all(isinstance(x, float | int) for x in row["drift"])
        for row in rows
    )


def lines(task: SamplingTask, sampler: Sampler, paths: Paths) -> Iterator[str]:
    """Say how far a run drifts from a dense one, or why that is not known."""
    report, weights = report_of(task), paths.weights_of(task.part)
    if report is None:
        yield f"{UNKNOWN}: examples/drift.py measures it"
        return
    fast = task.settings.sampling.fast
    name = "" if fast is None else fast.measured
    if not any(weights.glob("*.safetensors")) and not weights.is_file():
        yield f"{UNKNOWN}: {name} is of {report['checkpoint']}, and no weights are here"
        return
    if (found := checkpoint_hash(weights)) != report["checkpoint"]:
        yield f"{UNKNOWN}, {found}: {name} is of {report['checkpoint']}"
        return
    ours = facts_of(task, sampler, paths)
    rows = [row for row in report["rows"] if row["of"].get("fast")]
    if not rows:
        yield f"{UNKNOWN}: {name} has no row with sampling.fast"
        return
    apart = [[key for key in ours if row["of"].get(key) != ours[key]] for row in rows]
    nearest = min(range(len(rows)), key=lambda i: len(apart[i]))
    row = rows[nearest]
    if apart[nearest]:
        keys = ", ".join(apart[nearest])
        yield f"not measured so on this checkpoint: the nearest row of {name} is"
        yield f"{row['name']}, and differs in {keys}"
        return
    yield _measured(row, report.get("floor"))
    made = ", ".join(str(report[key]) for key in ("machine", "date") if key in report)
    yield f"row {row['name']} of {name}{made and ': '}{made}"


def _measured(row: Mapping[str, Any], floor: Any) -> str:
    drift = float(np.median(row["drift"]))
    times = (
        f", {drift / floor:.1f} x another kernel's" if isinstance(floor, float) and floor else ""
    )
    beside = ""
    if "against" in row and "same_cost" in row:
        beside = f"; beside {row['same_cost']} {row['against']}"
    return f"measured on this checkpoint: drift {drift:.4f}{times}{beside}"
