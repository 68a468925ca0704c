"""Reads the file of measurements that `maxattn tune` writes.

Measurements change only which kernel and sizes run, so damage raises no error: a damaged file, or a
file of another version, counts as empty, and a damaged measurement is left out.

A measurement has either times of one kernel with given block sizes, or times of several kernels on
one call, measured in turns.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from maxattn.config.document import read_json
from maxattn.config.numbers import finite, whole

VERSION: Final = 1
BLOCKS = ("flash", "tokamax_flash", "tpu_flash")  # kernels with flash_block_sizes
CHUNKS = "memory_efficient"  # the kernel with query_chunk_size and key_chunk_size
ESTIMATED: Final = "estimated"  # value of "source" if a compiler's schedule gave the times
PASSES = ("forward_ms", "backward_ms")
MOST_KERNELS, MOST_ROUNDS = 64, 1000
_OF_SIZES = ("device_kind", "versions", "kernel", "call")
_OF_KERNELS = ("device_kind", "versions", "call", "settings", "data")


class Kept(NamedTuple):
    """The valid measurements of a file, and a description of its damage ("" if undamaged)."""

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
        return Kept([], f"it has no list of measurements of version {VERSION}")
    sound = [{"error": ""} | m if is_of_sizes(m) else m for m in listed if is_sound(m)]
    wrong = len(listed) - len(sound)
    damage = f"{wrong} of its {len(listed)} measurements are not in `maxattn tune`'s format"
    return Kept(sound, damage if wrong else "")


def is_of_sizes(measurement: Mapping[str, Any]) -> bool:
    """Check whether a measurement times one kernel with given sizes, not several kernels."""
    return "sizes" in measurement


def is_estimated(measurement: Mapping[str, Any]) -> bool:
    """Check whether the times are estimates from a compiler's schedule."""
    return measurement.get("source") == ESTIMATED


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Check whether two measurements time the same call, so that the newer one replaces one."""
    if is_of_sizes(one) != is_of_sizes(other) or is_estimated(one) != is_estimated(other):
        return False
    keys = (*_OF_SIZES, "sizes") if is_of_sizes(one) else _OF_KERNELS
    return all(one[key] == other[key] for key in keys)


def is_sound(measurement: Any) -> bool:
    """Check whether a measurement has the fields and types that `maxattn tune` writes."""
    if not isinstance(measurement, dict):
        return False
    m = measurement
    if is_of_sizes(m):
        times = ("forward_ms", "training_ms")
        if not {*_OF_SIZES, *times} <= m.keys():
            return False
        texts = (*(m[key] for key in _OF_SIZES), m.get("error", ""), m.get("source", ""))
        are_times = all(m[key] is None or finite(m[key], 0) is not None for key in times)
        are_texts = all(isinstance(text, str) for text in texts)
        return are_texts and are_times and _are_sizes(m["kernel"], m["sizes"])
    if not {*_OF_KERNELS, *PASSES, "failed"} <= m.keys():
        return False
    failed = m["failed"]
    if not isinstance(failed, dict) or len(failed) > MOST_KERNELS:
        return False
    texts = (*(m[key] for key in _OF_KERNELS), *failed, *failed.values())
    are_texts = all(isinstance(text, str) for text in texts)
    return are_texts and all(_are_rounds(m[key]) for key in PASSES)


def _are_rounds(times: Any) -> bool:
    """Check whether a value maps each kernel to its milliseconds in every round."""
    if not isinstance(times, dict) or len(times) > MOST_KERNELS:
        return False
    listed = list(times.values())
    if not all(isinstance(ms, list) and 1 <= len(ms) <= MOST_ROUNDS for ms in listed):
        return False
    return all(times) and all(finite(x, 0) for ms in listed for x in ms)


def _are_sizes(kernel: str, sizes: Any) -> bool:
    """Check whether a config accepts a value as sizes of the kernel."""
    from maxattn.config.settings import FlashBlockSizes

    known = {CHUNKS: {"query_chunk_size", "key_chunk_size"}}
    known |= {name: set(FlashBlockSizes.model_fields) for name in BLOCKS}
    if not isinstance(sizes, dict) or not sizes or not sizes.keys() <= known.get(kernel, set()):
        return False
    return all(
        isinstance(size, bool) if key == "use_fused_bwd_kernel" else whole(size) is not None
        for key, size in sizes.items()
    )
