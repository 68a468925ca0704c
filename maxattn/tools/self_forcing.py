"""Translates a YAML of Self-Forcing, LongLive or a related project to maxattn's section `rollout`.

These projects set the window in frames, and their code has defaults. maxattn's `rollout` has the
window in blocks, and lists every value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from maxattn.config.document import Document, read
from maxattn.config.errors import ConfigErrors, plain, problem, refused
from maxattn.config.foreign import KEYS, is_rollout, value_of
from maxattn.config.load import check_path, in_file_order
from maxattn.config.numbers import finite, whole
from maxattn.errors import ConfigError

MOST_TIME = 1000  # the timestep of pure noise; 0 is clean


class TakenValue(NamedTuple):
    """How a value of `KEYS` is read; `read` returns None if it is bad."""

    rule: str
    example: str
    read: Callable[[Any], Any]


FLAG = TakenValue("true or false", "true", lambda x: x if isinstance(x, bool) else None)


def _steps(value: Any) -> list[Any] | None:
    if not isinstance(value, list) or not value or not value[0]:
        return None
    are_times = all(finite(x, 0, MOST_TIME) is not None for x in value)
    return value if are_times and all(a > b for a, b in pairwise(value)) else None


TAKEN: dict[str, TakenValue] = {
    "frames_per_block": TakenValue("a whole number of frames, at least 1", "3", whole),
    "frames_seen": TakenValue(
        "a whole number of frames, or -1 for all", "12", lambda x: whole(x, -1) or None
    ),
    "sink": TakenValue("a whole number of frames, at least 0", "3", lambda x: whole(x, 0)),
    "first_frame_alone": FLAG,
    "denoising_steps": TakenValue(
        "a list of decreasing timesteps, at most 1000, with 0 only at its end",
        "[1000, 750, 500, 250]",
        _steps,
    ),
    "warp_steps": FLAG,
    "timestep_shift": TakenValue("a number above 0", "5.0", lambda x: finite(x, 0) or None),
    "context_noise": TakenValue(
        "a timestep from 0 (clean) to below 1000", "0", lambda x: finite(x, 0, MOST_TIME - 1e-9)
    ),
    "by_slots": FLAG,
    "causal": FLAG,
    "model": TakenValue(
        "the name of a model", "Wan2.1-T2V-1.3B", lambda x: x if isinstance(x, str) else None
    ),
}
THEIRS = {  # defaults in the code of these projects
    "frames_per_block": 1,
    "warp_steps": False,
    "timestep_shift": 8.0,
    "model": "Wan2.1-T2V-1.3B",
}
SIZES = {  # their model names -> maxattn's
    "Wan2.1-T2V-1.3B": "wan-2.1-t2v-1.3b",
    "Wan2.1-T2V-14B": "wan-2.1-t2v-14b",
    "Wan2.2-TI2V-5B": "wan-2.2-ti2v-5b",
}


class ImportedRollout(NamedTuple):
    """The rollout that a file describes."""

    # the keys of the section `rollout` of maxattn_examples.common.settings
    rollout: dict[str, Any]
    sizes: str | None  # the value of `model.sizes`; None if maxattn does not have the model
    # left_out, notes: as in `Imported`
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def load_rollout(path: str | os.PathLike[str]) -> ImportedRollout:
    """Read the rollout settings of a YAML of Self-Forcing, LongLive or a related project.

    Args:
        path: the file.

    Raises:
        ConfigErrors: with every problem of the translated keys, by file and line; or if the file
            has no key of a rollout.
    """
    check_path(path)
    source = os.fspath(path)
    document = read(source)
    if not is_rollout(document.data):
        rule = "it must set num_frame_per_block, denoising_step_list or local_attn_size"
        remedy = "name a YAML of Self-Forcing or LongLive; maxattn's own need no conversion"
        raise refused(source, "not a Self-Forcing file", rule, remedy)
    values, keys, problems = _taken(document)
    problems += [*document.problems, *_contradictions(values, keys, document)]
    if problems:
        raise ConfigErrors(sorted(problems, key=in_file_order), source)
    return ImportedRollout(
        _rollout(THEIRS | values),
        SIZES.get(values.get("model", THEIRS["model"])),
        tuple(_left_out(document.data, set(keys.values()))),
        tuple(_notes(document.data, values, keys)),
    )


def _taken(document: Document) -> tuple[dict[str, Any], dict[str, str], list[ConfigError]]:
    """Return the translated values, the file's key of each, and an error for each wrong value."""
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    problems: list[ConfigError] = []
    for name, taken in TAKEN.items():
        for key in (key for key in KEYS[name] if value_of(document.data, key) is not None):
            value = value_of(document.data, key)
            if taken.read(value) is None:
                rule, remedy = f"it must be {taken.rule}", f"write for example {taken.example}"
                problems.append(_wrong(document, key, rule, remedy))
            elif name in values and values[name] != value:
                other = keys[name]
                rule = f"it must equal {other}, which is {plain(values[name])}"
                problems.append(_wrong(document, key, rule, f"remove {key} or {other}"))
            elif name not in values:
                values[name], keys[name] = value, key
    return values, keys, problems


def _wrong(document: Document, key: str, rule: str, remedy: str) -> ConfigError:
    line, _ = document.line_of(tuple(key.split(".")))
    return problem(key, plain(value_of(document.data, key)), rule, remedy, document.where(line))


def _contradictions(
    values: Mapping[str, Any], keys: Mapping[str, str], document: Document
) -> Iterator[ConfigError]:
    size, seen = values.get("frames_per_block", 1), values.get("frames_seen", -1)
    if seen > 0 and seen % size:
        near = sorted({max(size, seen // size * size), -(-seen // size) * size})
        rule = f"a window must be a multiple of num_frame_per_block, which is {size}"
        yield _wrong(document, keys["frames_seen"], rule, f"write {' or '.join(map(str, near))}")
    elif seen > 0 and values.get("sink", 0) > seen - size:
        rule = f"the sink and a block of {size} frames must fit into the window of {seen} frames"
        yield _wrong(document, keys["sink"], rule, f"write at most {seen - size}")
    if values.get("causal") is False:
        rule = "a rollout needs a causal model, which attends to no later frames"
        yield _wrong(document, keys["causal"], rule, "name the file of a causal model")


def _left_out(data: Mapping[str, Any], taken: set[str]) -> Iterator[str]:
    """List the untranslated keys; a section without translated keys is listed by its name."""
    for key, value in data.items():
        if not any(name.partition(".")[0] == key for name in taken):
            yield str(key)
        elif isinstance(value, Mapping):
            yield from (f"{key}.{inner}" for inner in value if f"{key}.{inner}" not in taken)


# ---- our section ---------------------------------------------------------------------------------


def _rollout(values: Mapping[str, Any]) -> dict[str, Any]:
    size, seen = values["frames_per_block"], values.get("frames_seen", -1)
    sink = values.get("sink", 0) if seen > 0 else 0
    by_slots = "slots_with_sink" if sink else "slots"
    steps = [step for step in values.get("denoising_steps", ()) if step]
    return {
        "frames_per_block": size,
        "window": seen // size if seen > 0 else None,
        "sink": sink,
        "first_frame_alone": values.get("first_frame_alone", False),
        **({"denoising_steps": steps, "warp_steps": values["warp_steps"]} if steps else {}),
        "timestep_shift": float(values["timestep_shift"]),
        "context_noise": float(values.get("context_noise", 0)),
        "positions": by_slots if values.get("by_slots") else "absolute",
    }


def _notes(
    data: Mapping[str, Any], values: Mapping[str, Any], keys: Mapping[str, str]
) -> Iterator[str]:
    """Yield a note for each setting whose meaning or value differs from the file's."""
    size, seen = values.get("frames_per_block", 1), values.get("frames_seen", -1)
    if seen > 0:
        yield f"{keys['frames_seen']}: {seen} frames are {seen // size} blocks of {size}"
    elif values.get("sink"):
        kept = "local_attn_size is -1, so every frame stays in the window"
        yield f"{keys['sink']}: {values['sink']} is left out: {kept}"
    steps = values.get("denoising_steps")
    if steps is None:
        their = "their code then samples each block in sampling_steps steps of a scheduler"
        yield f"denoising_step_list is not set: {their}; set rollout.denoising_steps"
    elif not steps[-1]:
        yield "the 0 at the end of denoising_step_list is left out: it is the clean block"
    if steps and (scale := data.get("guidance_scale")) is not None:
        yield f"guidance_scale: {plain(scale)} is left out: it is for the teacher in distillation"
    for name, default in THEIRS.items():
        if name not in values and (name != "warp_steps" or "denoising_steps" in values):
            yield f"{KEYS[name][0]} is not set: their default {plain(default)} is used"
    if (shift := data.get("timestep_shift")) is not None:
        outside = f"timestep_shift: {plain(shift)} outside of model_kwargs"
        yield f"{outside} is left out: it is for training"
    if values.get("by_slots"):
        how = "K is cached without rotary embedding, and rotated by its slot in the cache"
        yield f"{keys['by_slots']}: {how}"
    if (name := values.get("model")) is not None and name not in SIZES:
        none = f"is none of {', '.join(SIZES)}"
        yield f"{keys['model']}: {name} {none}: set model.sizes yourself"
