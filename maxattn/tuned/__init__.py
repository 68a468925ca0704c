"""Kernel sizes measured on a machine: `maxattn tune` writes them, `Target.here()` reads them.

A plan stays a pure function: the sizes are part of its `Target`. They replace sizes that the config
leaves unset, and change no result beyond rounding.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from maxattn.call import Call
from maxattn.config.measurements import BLOCKS, CHUNKS, is_estimated, is_of_sizes, read_kept
from maxattn.errors import ConfigError

if TYPE_CHECKING:
    from maxattn.config import AttentionConfig
    from maxattn.target import Target

log = logging.getLogger("maxattn")
VARIABLE = "MAXATTN_CACHE"
Sizes = tuple[tuple[str, int | bool], ...]


@dataclass(frozen=True)
class Tuned:
    """The fastest measured sizes for one kernel and local call."""

    kernel: str
    call: str  # `key_of` the call that one device computes
    sizes: Sizes  # (key of the config, value) pairs
    milliseconds: float  # time with these sizes
    training: bool  # whether the time is of forward and backward; otherwise of the forward alone
    source: str  # the file of the measurement
    # whether the time is estimated from a compiler's schedule, and nothing ran
    estimated: bool = False

    def __str__(self) -> str:
        what = "forward and backward" if self.training else "forward"
        sizes = ", ".join(f"{key} {value}" for key, value in self.sizes)
        return f"{sizes}: {in_ms(self.milliseconds)} {what}"


def in_ms(time: float) -> str:
    """Write milliseconds with three digits, or as a whole number above a second."""
    return f"{time:.3g} ms" if time < 1000 else f"{time:,.0f} ms"


def key_of(call: Call) -> str:
    """Return the key of a local call: shape, dtype, role and mask."""
    return f"{call.role}-attention {call.shape_text} {call.mask}"


def versions_of(kernel: str, packages: Iterable[tuple[str, str]]) -> str:
    """Return as text the versions that a measurement is valid for."""
    needed = ("jax", "tokamax") if kernel == "tokamax_flash" else ("jax",)
    return ", ".join(f"{name} {version}" for name, version in packages if name in needed)


# ---- in a plan -----------------------------------------------------------------------------------


def tuned_config(
    config: AttentionConfig, kernel: str, local: Call, target: Target
) -> AttentionConfig:
    """Return the config with a kernel's sizes measured on the target, if there are any."""
    tuned = tuned_for(config, kernel, local, target)
    return with_sizes(config, kernel, tuned.sizes) if tuned else config


def tuned_note(
    config: AttentionConfig, kernel: str, local: Call, target: Target
) -> tuple[str, ...]:
    """Return the plan's note on a kernel's measured sizes, if there are any."""
    tuned = tuned_for(config, kernel, local, target)
    if tuned is None:
        return ()
    measured, estimated = "measured on this machine", "estimated by libtpu's schedule, not run"
    how = estimated if tuned.estimated else measured
    return (f"sizes {how}, {tuned}; from {tuned.source}",)


def tuned_for(config: AttentionConfig, kernel: str, local: Call, target: Target) -> Tuned | None:
    """Return the measured sizes of a kernel for a local call; None if the config sets any."""
    table = target.tuned
    if not table or local.bias is not None or not leaves_open(config, kernel):
        return None
    key = key_of(local)
    return next((entry for entry in table if entry.kernel == kernel and entry.call == key), None)


def leaves_open(config: AttentionConfig, kernel: str) -> bool:
    """Check whether the config sets none of the kernel's sizes."""
    if kernel in BLOCKS:
        return "flash_block_sizes" not in config.changed
    return kernel == CHUNKS and config.query_chunk_size is None and config.key_chunk_size is None


def with_sizes(
    config: AttentionConfig, kernel: str, sizes: Iterable[tuple[str, int | bool]]
) -> AttentionConfig:
    """Return the config with a kernel's sizes set."""
    from maxattn.config import FlashBlockSizes

    values: dict[str, Any] = dict(sizes)
    if kernel in BLOCKS:
        values = {"flash_block_sizes": FlashBlockSizes(**values)}
    return config.replace(**values)


# ---- the file ------------------------------------------------------------------------------------


def cache_path() -> Path:
    """Return the file of measurements: tuned.json in $MAXATTN_CACHE, else in ~/.cache/maxattn.

    Raises:
        ConfigError: the variable is not set, and the user has no home folder.
    """
    if folder := os.environ.get(VARIABLE):
        return Path(folder) / "tuned.json"
    try:
        return Path.home() / ".cache" / "maxattn" / "tuned.json"
    except RuntimeError:
        rule = "measurements are kept in ~/.cache/maxattn, and this user has no home folder"
        remedy = f"set {VARIABLE} to a folder that you may write to"
        raise ConfigError(VARIABLE, "not set", rule, remedy) from None


def table_of(device_kind: str, packages: tuple[tuple[str, str], ...]) -> tuple[Tuned, ...]:
    """Return a device kind's fastest sizes for these versions; damaged ones are warned of once."""
    state = cache_state()
    return () if state is None else _table(state, device_kind, packages)


State = tuple[Path, int, int]
"""A file with its time and size, which change with its contents."""


def cache_state() -> State | None:
    """Return the state of the file of measurements, or None if it cannot be read."""
    try:
        path = cache_path()
        stamp = path.stat()
    except (OSError, ValueError):  # no file; ConfigError: no home folder
        return None
    if not S_ISREG(stamp.st_mode):  # reading a pipe would wait for its writer
        return None
    return path, stamp.st_mtime_ns, stamp.st_size


@lru_cache(maxsize=8)
def _table(
    state: State, device_kind: str, packages: tuple[tuple[str, str], ...]
) -> tuple[Tuned, ...]:
    return winners(sound_in(state), device_kind, packages, str(state[0]))


@lru_cache(maxsize=8)
def sound_in(state: State) -> list[dict[str, Any]]:
    """Return the sound measurements of a file; log the damage of the others once."""
    measurements, damage = read_kept(state[0])
    if damage:
        remedy = f"delete it, or point {VARIABLE} to another folder"
        log.warning(
            "measurements of `maxattn tune` are ignored: %s: %s; %s", state[0], damage, remedy
        )
    return measurements


def winners(
    measurements: Iterable[Mapping[str, Any]],
    device_kind: str,
    packages: tuple[tuple[str, str], ...],
    source: str,
) -> tuple[Tuned, ...]:
    """Choose the fastest sizes of each call: training before forward, measured before estimated."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for m in (m for m in measurements if is_of_sizes(m)):
        if m["device_kind"] == device_kind and m["versions"] == versions_of(m["kernel"], packages):
            groups.setdefault((m["kernel"], m["call"]), []).append(m)
    found = (_fastest(group, source) for group in groups.values())
    return tuple(entry for entry in found if entry is not None)


def _fastest(group: list[Mapping[str, Any]], source: str) -> Tuned | None:
    for estimated, field in product((False, True), ("training_ms", "forward_ms")):
        timed = [m for m in group if is_estimated(m) == estimated and m[field] is not None]
        if timed:
            best = min(timed, key=lambda m: m[field])
            what, sizes = (best["kernel"], best["call"]), tuple(best["sizes"].items())
            return Tuned(*what, sizes, best[field], field == "training_ms", source, estimated)
    return None
