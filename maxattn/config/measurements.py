"""Reads the file that `maxattn tune` keeps, and takes nothing from it that tune does not write.

A file that is damaged or of another version has no measurements; a damaged measurement is left out.
Neither is an error: the file changes no result, and no call may break by it.

There are two kinds: times of one kernel with certain sizes, and times of several kernels on one
call, which were taken in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """The sound measurements of a file, and what is wrong with the others; "" if nothing is."""

    measurements: list[dict[str, Any]]
    damage: str = ""


def read_kept(path: Path) -> Kept:
    """Read the measurements of a file; none if there is no file."""
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
    """Whether it is of one kernel's sizes, not of several kernels."""
    return "sizes" in measurement


def is_sound(measurement: Any) -> bool:
    """Whether a measurement is one that `maxattn tune` can have written."""
    if not isinstance(measurement, dict):
        return False
    m, of_sizes = measurement, is_of_sizes(measurement)
    names = (*_TEXTS, *_TIMES) if of_sizes else (*_OF_KERNELS, *PASSES, "failed")
    if not {*names} <= m.keys():
        return False
    if of_sizes:
        texts = (*(m[key] for key in _TEXTS), m.get("error", ""), m.get("source", ""))
        if not all(isinstance(text, str) for text in texts):
            return False
        in_time = all(m[key] is None or finite(m[key], 0) is not None for key in _TIMES)
        return in_time and _are_sizes(m["kernel"], m["sizes"])
    failed = m["failed"]
    if not isinstance(failed, dict) or len(failed) > MOST_KERNELS:
        return False
    texts = (*(m[key] for key in _OF_KERNELS), *failed, *failed.values())
    if not all(isinstance(text, str) for text in texts):
        return False
    return all(_are_rounds(m[key]) for key in PASSES)


def is_estimated(measurement: Mapping[str, Any]) -> bool:
    """Whether its times are a compiler's schedule's; then nothing ran."""
    return measurement.get("source") == ESTIMATED


def _are_rounds(times: Any) -> bool:
    """Whether these are milliseconds of each round, by kernel."""
    if not isinstance(times, dict) or len(times) > MOST_KERNELS:
        return False
    listed = list(times.values())
    if not all(isinstance(ms, list) and 1 <= len(ms) <= MOST_ROUNDS for ms in listed):
        return False
    return all(times) and all(finite(x, 0) for ms in listed for x in ms)


def _are_sizes(kernel: str, sizes: Any) -> bool:
    """Whether a kernel has these sizes, each of them a number that a config takes."""
    from maxattn.config.settings import FlashBlockSizes

    known = {"query_chunk_size", "key_chunk_size"} if kernel == CHUNKS else set()
    known = set(FlashBlockSizes.model_fields) if kernel in BLOCKS else known
    if not isinstance(sizes, dict) or not sizes or not sizes.keys() <= known:
        return False
    return all(
        isinstance(size, bool) if key == "use_fused_bwd_kernel" else whole(size) is not None
        for key, size in sizes.items()
    )
