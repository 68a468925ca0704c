"""Reads the file that `maxattn tune` keeps, and takes nothing from it that tune does not write.

A file that is damaged, or of another version, holds no measurements; a measurement that is damaged
is left out. Neither is an error: the sizes in it change no result, and no call may break by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, Final, NamedTuple

from maxattn.config.numbers import finite, whole
from maxattn.config.plain_json import read_json

VERSION: Final = 1
BLOCKS = ("flash", "tokamax_flash")  # whose sizes are flash_block_sizes
CHUNKS = "memory_efficient"  # whose sizes are query_chunk_size and key_chunk_size
_TEXTS = ("device_kind", "versions", "kernel", "call")
_TIMES = ("forward_ms", "training_ms")
ESTIMATED: Final = "estimated"  # the source of times of a compiler's schedule; others are measured


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
    return Kept([{"error": ""} | m for m in sound], said if wrong else "")


def is_sound(measurement: Any) -> bool:
    """Say whether a measurement is one that `maxattn tune` can have written."""
    if not isinstance(measurement, dict) or not {*_TEXTS, *_TIMES, "sizes"} <= measurement.keys():
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
