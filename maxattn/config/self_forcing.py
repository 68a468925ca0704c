"""Reads a YAML of Self-Forcing, LongLive or their kin: what it says of a rollout, in our words.

There a window is frames, and much has a default in their code; here a window is blocks, and
everything is written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from maxattn.config.document import Document, read
from maxattn.config.errors import ConfigErrors, dotted, plain, problem
from maxattn.config.load import check_path, in_file_order
from maxattn.config.numbers import finite, whole
from maxattn.errors import ConfigError

KeyPath = tuple[str, ...]
MODEL, DRAWING = "model_kwargs", "inference"
MOST_TIME = 1000


class Kind(NamedTuple):
    """A kind of value: the rule in words, what to write instead, and the test."""

    rule: str
    remedy: str
    holds: Callable[[Any], bool]


def _is_steps(value: Any) -> bool:
    if not isinstance(value, list) or not value or not value[0]:
        return False
    is_time = all(finite(x, 0, MOST_TIME) is not None for x in value)
    return is_time and all(a > b for a, b in pairwise(value))


COUNT = Kind(
    "a whole number of frames, at least 1", "write for example 3", lambda x: whole(x) is not None
)
FRAMES_OR_ALL = Kind(
    "a whole number of frames, or -1 for all",
    "write for example 12",
    lambda x: x != 0 and whole(x, -1) is not None,
)
FRAMES = Kind(
    "a whole number of frames, from 0", "write for example 3", lambda x: whole(x, 0) is not None
)
FLAG = Kind("true or false", "write true or false", lambda x: isinstance(x, bool))
SHIFT = Kind("a number above 0", "write for example 5.0", lambda x: finite(x, 0) not in (None, 0.0))
TIME = Kind(
    f"a time from 0 (clean) to below {MOST_TIME}",
    "write 0",
    lambda x: finite(x, 0, MOST_TIME - 1e-9) is not None,
)
STEPS = Kind(
    f"a list of falling times, from {MOST_TIME} (noise) on, with 0 at most at its end",
    "write for example [1000, 750, 500, 250]",
    _is_steps,
)
NAME = Kind(
    "the name of a model", "write for example Wan2.1-T2V-1.3B", lambda x: isinstance(x, str)
)

# Our name of each value that is taken: its possible places, the first one first, and its kind.
TAKEN: dict[str, tuple[tuple[KeyPath, ...], Kind]] = {
    "frames_per_block": (
        (("num_frame_per_block",), (MODEL, "num_frame_per_block")), COUNT,
    ),
    "frames_seen": (((MODEL, "local_attn_size"), ("local_attn_size",)), FRAMES_OR_ALL),
    "sink": (((MODEL, "sink_size"), (DRAWING, "sink_size"), ("sink_size",)), FRAMES),
    "first_frame_alone": ((("independent_first_frame",),), FLAG),
    "denoising_steps": ((("denoising_step_list",),), STEPS),
    "warp_steps": ((("warp_denoising_step",),), FLAG),
    "timestep_shift": (((MODEL, "timestep_shift"),), SHIFT),
    "context_noise": ((("context_noise",),), TIME),
    "by_slots": (
        ((MODEL, "use_infinite_attention"), (MODEL, "use_relative_rope")), FLAG,
    ),
    "causal": ((("causal",), ("algorithm", "causal")), FLAG),
    "model": (((MODEL, "model_name"), ("model_name",)), NAME),
}  # fmt: skip
# Defaults of their code.
THEIRS = {
    "frames_per_block": 1,
    "warp_steps": False,
    "timestep_shift": 8.0,
    "model": "Wan2.1-T2V-1.3B",
}
# Their names of models, and ours.
SIZES = {
    "Wan2.1-T2V-1.3B": "wan-2.1-t2v-1.3b",
    "Wan2.1-T2V-14B": "wan-2.1-t2v-14b",
    "Wan2.2-TI2V-5B": "wan-2.2-ti2v-5b",
}
_TELLING = ("frames_per_block", "frames_seen", "denoising_steps", "warp_steps")


class ImportedRollout(NamedTuple):
    """The outcome of reading such a file.

    Args:
        rollout: the keys of the section `rollout`, as examples/common/rollout_settings.py has them.
        sizes: of the model, as `model.sizes` says them; None where the file names none of ours.
        left_out: names of the keys that were not taken, dotted, in the order of the file.
        notes: what was read otherwise than it was written, and why.
    """

    rollout: dict[str, Any]
    sizes: str | None
    left_out: tuple[str, ...]
    notes: tuple[str, ...]


def load_rollout(path: str | os.PathLike[str]) -> ImportedRollout:
    """Read what a file of Self-Forcing, LongLive or their kin says of a rollout.

    Args:
        path: the file.

    Raises:
        ConfigErrors: for everything wrong in the keys that are taken, with file and line; for a
            file that has none of them.
    """
    check_path(path)
    source = os.fspath(path)
    document = read(source)
    if not is_theirs(document.data):
        rule = "such a file says num_frame_per_block, denoising_step_list or local_attn_size"
        remedy = "a file of maxattn's own needs no conversion"
        raise ConfigErrors([problem(source, "no file of Self-Forcing", rule, remedy)], source)
    values, paths, problems = _taken(document)
    problems += [*document.problems, *_contradictions(values, paths, document)]
    if problems:
        raise ConfigErrors(sorted(problems, key=in_file_order), source)
    return ImportedRollout(
        _rollout(THEIRS | values),
        SIZES.get(values.get("model", THEIRS["model"])),
        tuple(_left_out(document.data, set(paths.values()))),
        tuple(_notes(document.data, values, paths)),
    )


def is_theirs(data: Mapping[str, Any]) -> bool:
    """Whether a file's values are those of a model that makes videos block by block."""
    places = (path for name in _TELLING for path in TAKEN[name][0])
    return any(found(data, path) is not None for path in places)


def found(data: Mapping[str, Any], path: KeyPath) -> Any:
    """Return the value at a path; None where there is none."""
    here: Any = data
    for part in path:
        here = here.get(part) if isinstance(here, Mapping) else None
    return here


def recognised_rollout(data: Mapping[str, Any], source: str) -> ConfigError | None:
    """Return the error of a file of theirs that is read as one of ours; None for another file.

    Args:
        data: the file's values.
        source: the file.
    """
    if not is_theirs(data):
        return None
    places = (path for paths, _ in TAKEN.values() for path in paths)
    keys = [dotted(path) for path in places if found(data, path) is not None]
    rule = f"{', '.join(keys[:4])}: keys of a Self-Forcing or LongLive YAML, and this reads ours"
    remedy = f"`maxattn convert {source} > stream.yml` makes the section rollout of it"
    return ConfigError(source, "a Self-Forcing file", rule, remedy)


# ---- reading -------------------------------------------------------------------------------------


def _taken(document: Document) -> tuple[dict[str, Any], dict[str, KeyPath], list[ConfigError]]:
    """Return the values that are taken, their paths, and what is wrong with each by itself."""
    values: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}
    problems: list[ConfigError] = []
    for name, (places, kind) in TAKEN.items():
        for path in (path for path in places if found(document.data, path) is not None):
            value = found(document.data, path)
            if not kind.holds(value):
                problems.append(_wrong(document, path, kind.rule, kind.remedy))
            elif name in values and values[name] != value:
                other = dotted(paths[name])
                rule = f"{other} says {plain(values[name])}"
                problems.append(_wrong(document, path, rule, f"leave it or {other} out"))
            elif name not in values:
                values[name], paths[name] = value, path
    return values, paths, problems


def _wrong(document: Document, path: KeyPath, rule: str, remedy: str) -> ConfigError:
    line, _ = document.line_of(path)
    return problem(
        dotted(path), plain(found(document.data, path)), rule, remedy, document.where(line)
    )


def _contradictions(
    values: Mapping[str, Any], paths: Mapping[str, KeyPath], document: Document
) -> Iterator[ConfigError]:
    """Refuse windows of no whole blocks, sinks too large for them, and bidirectional models."""
    size, seen = values.get("frames_per_block", 1), values.get("frames_seen", -1)
    if seen > 0 and seen % size:
        near = sorted({max(size, seen // size * size), -(-seen // size) * size})
        rule = f"a window is whole blocks of {size} frames, as num_frame_per_block says"
        yield _wrong(document, paths["frames_seen"], rule, f"write {' or '.join(map(str, near))}")
    elif seen > 0 and values.get("sink", 0) > seen - size:
        rule = f"sink and a block of {size} frames both fit the window of {seen} frames"
        yield _wrong(document, paths["sink"], rule, f"write at most {seen - size}")
    if values.get("causal") is False:
        rule = "a rollout is of a model that sees no later frames"
        yield _wrong(document, paths["causal"], rule, "give the file of a causal model")


def _left_out(data: Mapping[str, Any], taken: set[KeyPath]) -> Iterator[str]:
    """Name what was not taken: a mapping as a whole if none of its keys was."""
    for key, value in data.items():
        inside = [path for path in taken if path[0] == key]
        if not inside:
            yield str(key)
        elif isinstance(value, Mapping):
            yield from (dotted((str(key), str(k))) for k in value if (key, k) not in taken)


# ---- in our words --------------------------------------------------------------------------------


def _rollout(said: Mapping[str, Any]) -> dict[str, Any]:
    size, seen = said["frames_per_block"], said.get("frames_seen", -1)
    sink = said.get("sink", 0) if seen > 0 else 0
    by_slots = "slots_with_sink" if sink else "slots"
    steps = [step for step in said.get("denoising_steps", ()) if step]
    return {
        "frames_per_block": size,
        "window": seen // size if seen > 0 else None,
        "sink": sink,
        "first_frame_alone": said.get("first_frame_alone", False),
        **({"denoising_steps": steps, "warp_steps": said["warp_steps"]} if steps else {}),
        "timestep_shift": float(said["timestep_shift"]),
        "context_noise": float(said.get("context_noise", 0)),
        "positions": by_slots if said.get("by_slots") else "absolute",
    }


def _notes(
    data: Mapping[str, Any], values: Mapping[str, Any], paths: Mapping[str, KeyPath]
) -> Iterator[str]:
    """Yield what was read otherwise than it was written."""
    size, seen = values.get("frames_per_block", 1), values.get("frames_seen", -1)
    if seen > 0:
        yield f"{dotted(paths['frames_seen'])}: {seen} frames are {seen // size} blocks of {size}"
    elif values.get("sink"):
        sink = f"{dotted(paths['sink'])}: {values['sink']}"
        yield f"{sink} is left out: local_attn_size is -1, so every frame stays"
    steps = values.get("denoising_steps")
    if steps is None:
        yield (
            "there is no denoising_step_list: their code samples each block with a scheduler, in"
            " sampling_steps; set rollout.denoising_steps"
        )
    elif not steps[-1]:
        yield "the 0 at the end of denoising_step_list is left out: it is the clean block itself"
    if steps and data.get("guidance_scale") is not None:
        scale = f"guidance_scale: {plain(data['guidance_scale'])}"
        yield f"{scale} is that of the teacher in distillation, and left out"
    for name, theirs in THEIRS.items():
        if name not in values and (name != "warp_steps" or "denoising_steps" in values):
            yield f"{dotted(TAKEN[name][0][0])} is not set: {plain(theirs)}, as in their code"
    if (shift := data.get("timestep_shift")) is not None:
        yield f"timestep_shift: {plain(shift)} outside of {MODEL} is that of training, and left out"
    if values.get("by_slots"):
        where = dotted(paths["by_slots"])
        yield f"{where}: keys are kept without rotary embedding, and turned by their slot"
    if (name := values.get("model")) is not None and name not in SIZES:
        yield f"{dotted(paths['model'])}: {name} is none of {', '.join(SIZES)}; set model.sizes"
