"""Reads the file that `maxattn tune` keeps, and takes nothing from it that tune does not write.

A file that is damaged, or of another version, holds no measurements; a measurement that is damaged
is left out. Neither is an error: what is in it changes no result, and no call may break by it.

There are two kinds: times of one kernel with certain sizes, and times of several kernels on one
call, which were taken in turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Final, NamedTuple

from maxattn.config.numbers import finite, whole
from maxattn.config.plain_json import read_json

VERSION: Final = 1
BLOCKS = ("flash", "tokamax_flash", "tpu_flash")  # whose sizes are flash_block_sizes
CHUNKS = "memory_efficient"  # whose sizes are query_chunk_size and key_chunk_size
_TEXTS = ("device_kind", "versions", "kernel", "call")
_TIMES = ("forward_ms", "training_ms")
ESTIMATED: Final = "estimated"  # the source of times of a compiler's schedule; others are measured
_OF_KERNELS = ("device_kind", "versions", "call", "settings", "data")
PASSES = ("forward_ms", "backward_ms")
MOST_KERNELS, MOST_ROUNDS = 64, 1000


class Kept(NamedTuple):
    """Hold what a file says.

    Args:
        measurements: the sound ones.
        damage: what is wrong with the others or the file; empty where nothing is.
    """

    measurements: list[dict[str, Any]]
    damage: str = ""


def read_kept(path: Path) -> Kept:
    """Read the measurements of a file; none where there is no file."""
    try:
        found = read_json(path)
    except FileNotFoundError:
        return Kept([])
    except OSError as error:
        return Kept([], f"it cannot be read: {error.strerror or error}")
    except ValueError as error:
        return Kept([], str(error))
    version = found.get("version") if isinstance(found, dict) else None
    listed = found.get("measurements") if isinstance(found, dict) else None
    if whole(version) != VERSION or not isinstance(listed, list):
        return Kept([], f"it is no list of measurements of version {VERSION}")
    sound = [m for m in listed if is_sound(m)]
    wrong = len(listed) - len(sound)
    said = f"{wrong} of its {len(listed)} measurements are not as `maxattn tune` writes them"
    completed = [{"error": ""} | m if is_of_sizes(m) else m for m in sound]
    return Kept(completed, said if wrong else "")


def is_of_sizes(measurement: Mapping[str, Any]) -> bool:
    """Tell times of one kernel's sizes from those of several kernels."""
    return "sizes" in measurement


def is_sound(measurement: Any) -> bool:
    """Say whether a measurement is one that `maxattn tune` can have written."""
    if not isinstance(measurement, dict):
        return False
    of_sizes = is_of_sizes(measurement)
    return _is_sound_of_sizes(measurement) if of_sizes else _is_sound_of_kernels(measurement)


def _is_sound_of_sizes(measurement: dict[str, Any]) -> bool:
    if not {*_TEXTS, *_TIMES} <= measurement.keys():
        return False
    said = (measurement.get(key, "") for key in ("error", "source"))
    texts = (*(measurement[key] for key in _TEXTS), *said)
    if not all(isinstance(text, str) for text in texts):
        return False
    times = (measurement[key] for key in _TIMES)
    in_time = all(time is None or finite(time, 0) is not None for time in times)
    return in_time and _are_sizes(measurement["kernel"], measurement["sizes"])


def is_estimated(measurement: Mapping[str, Any]) -> bool:
    """Tell whether its times are a compiler's schedule's; then nothing ran."""
    return measurement.get("source") == ESTIMATED


def _is_sound_of_kernels(measurement: dict[str, Any]) -> bool:
    if not {*_OF_KERNELS, *PASSES, "failed"} <= measurement.keys():
        return False
    texts, failed = [measurement[key] for key in _OF_KERNELS], measurement["failed"]
    if not isinstance(failed, dict) or len(failed) > MOST_KERNELS:
        return False
    if not all(isinstance(text, str) for text in (*texts, *failed, *failed.values())):
        return False
    return all(_are_rounds(measurement[key]) for key in PASSES)


def _are_rounds(times: Any) -> bool:
    """Say whether these are milliseconds of each round, by kernel."""
    if not isinstance(times, dict) or len(times) > MOST_KERNELS:
        return False
    listed = list(times.values())
    if not all(isinstance(ms, list) and 1 <= len(ms) <= MOST_ROUNDS for ms in listed):
        return False
    return all(times) and all(finite(x, 0) for ms in listed for x in ms)


def _are_sizes(kernel: str, sizes: Any) -> bool:
    """Say whether a kernel has these sizes, each of them a number that a config takes."""
    if not isinstance(sizes, dict) or not sizes:
        return False
    return sizes.keys() <= _keys(kernel) and all(_is_size(*size) for size in sizes.items())


def _keys(kernel: str) -> Set[str]:
    """Return the keys of the config that tune sets for a kernel."""
    from maxattn.config.settings import FlashBlockSizes

    if kernel in BLOCKS:
        return FlashBlockSizes.model_fields.keys()
    return {"query_chunk_size", "key_chunk_size"} if kernel == CHUNKS else set()


def _is_size(key: str, value: Any) -> bool:
    is_switch = key == "use_fused_bwd_kernel"
    return isinstance(value, bool) if is_switch else whole(value) is not None
