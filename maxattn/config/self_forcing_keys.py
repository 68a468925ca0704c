"""The keys that YAML files of Self-Forcing, LongLive and their kin use, and how one is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from maxattn.config.errors import dotted
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

# Our name of what is taken: where it may stand, the first one first, and what it is.
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
# What their code takes where a file says nothing.
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
