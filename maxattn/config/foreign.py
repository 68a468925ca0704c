"""The keys by which a YAML of Self-Forcing, LongLive or a related project is recognised.

tools/self_forcing.py translates such a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from maxattn.errors import ConfigError

# maxattn's name of a value -> the dotted keys that may set it.
KEYS: dict[str, tuple[str, ...]] = {
    "frames_per_block": ("num_frame_per_block", "model_kwargs.num_frame_per_block"),
    "frames_seen": ("model_kwargs.local_attn_size", "local_attn_size"),
    "sink": ("model_kwargs.sink_size", "inference.sink_size", "sink_size"),
    "first_frame_alone": ("independent_first_frame",),
    "denoising_steps": ("denoising_step_list",),
    "warp_steps": ("warp_denoising_step",),
    "timestep_shift": ("model_kwargs.timestep_shift",),
    "context_noise": ("context_noise",),
    "by_slots": ("model_kwargs.use_infinite_attention", "model_kwargs.use_relative_rope"),
    "causal": ("causal", "algorithm.causal"),
    "model": ("model_kwargs.model_name", "model_name"),
}


def is_rollout(data: Mapping[str, Any]) -> bool:
    """Check whether a file sets a rollout key of Self-Forcing or a related project."""
    names = ("frames_per_block", "frames_seen", "denoising_steps", "warp_steps")
    return any(value_of(data, key) is not None for name in names for key in KEYS[name])


def recognised_rollout(data: Mapping[str, Any], source: str) -> ConfigError | None:
    """Return the error for a Self-Forcing file that is read as a maxattn config, else None."""
    if not is_rollout(data):
        return None
    every = (key for keys in KEYS.values() for key in keys)
    there = [key for key in every if value_of(data, key) is not None]
    theirs = f"it has keys of Self-Forcing or LongLive: {', '.join(there[:4])}"
    rule = f"the file must be a maxattn config, and {theirs}"
    remedy = f"convert it to a section rollout: `maxattn convert {source} > stream.yml`"
    return ConfigError(source, "a Self-Forcing file", rule, remedy)


def value_of(data: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key, None if there is none."""
    here: Any = data
    for part in key.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    return here
