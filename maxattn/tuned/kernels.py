"""Kernel times measured on a machine: `maxattn tune` writes them, `Target.here()` reads them, and
`attention: auto` chooses the fastest kernel.

A plan stays a pure function: the times are part of its `Target`. They decide which kernel runs, and
change no result beyond rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from statistics import median
from typing import TYPE_CHECKING, Any
from zlib import crc32

import jax

from maxattn.call import Call
from maxattn.config.measurements import is_of_sizes
from maxattn.kernels.table import TABLE
from maxattn.masks import Mask
from maxattn.tuned import State, cache_state, sound_in

if TYPE_CHECKING:
    from maxattn.config import AttentionConfig

Rounds = tuple[tuple[str, tuple[float, ...]], ...]
"""(kernel, ms of each round): the kernels of one pass were timed in turns."""
# Settings that change a kernel's work, besides the settings in the kernel's table row.
SETTINGS = ("float32_qk_product", "split_head_dim")
NOISE = 0.01  # kernels whose times differ by a smaller share are equally fast
DECISIVE = 0.8  # share of rounds that a faster kernel must win


@dataclass(frozen=True)
class CallTimes:
    """The measured times of the kernels for one local call."""

    call: str  # `key_of_kernels` of the call that one device computes
    settings: str  # `settings_of` the config
    versions: tuple[tuple[str, str], ...]  # (package, version) pairs of the measurement
    # forward, backward: times of each kernel; empty if the pass was not measured
    forward: Rounds
    backward: Rounds = ()
    failed: tuple[tuple[str, str], ...] = ()  # (kernel, why it did not run)
    data: str = ""  # values of the mask's arrays, as the user wrote them; "" for no arrays
    source: str = ""  # the file of the measurement

    def __hash__(self) -> int:
        # Targets are hashed at every call of attention: hashing times would take long.
        return hash((self.call, self.settings, self.data))


# ---- which calls share measurements --------------------------------------------------------------


def key_of_kernels(call: Call) -> str:
    """Return a text of the facts that a local call's times depend on.

    Values of lengths and ids are known only at run time, so calls with equal shapes share a key.
    Role and scale cost no time.

    >>> mask = ma.masks.KeyPadding(jnp.array([60, 512]))
    >>> q = jax.ShapeDtypeStruct((2, 512, 8, 64), jnp.bfloat16)
    >>> from maxattn.tuned.kernels import key_of_kernels
    >>> key_of_kernels(ma.Call.of(q, q, mask))
    'B=2 T=S=512 N=8 H=64 bf16 KeyPadding(int[2])'
    """
    mask = _local_form(call)
    numbers = tuple(_numbers(mask))
    # Of a long tuple of lengths only the first ones are written.
    which = f" {crc32(repr(numbers).encode()):08x}" if "..." in str(mask) else ""
    text = str(mask).replace("int64[", "int[").replace("int32[", "int[")
    return f"{call.shape_text} {text}{which}"


def unmeasured_for(call: Call) -> str:
    """Return why kernels are not measured for a local call; "" if they are."""
    if call.bias is not None:
        return "kernels are not measured with a bias"
    if call.sharded and not call.mask.is_full:
        mask = "which pairs a mask leaves to each device"
        return f"{mask} is known only where the sequence is split, so kernels are not measured"
    return ""


def settings_of(config: AttentionConfig) -> str:
    """Return as text the settings that differ from their default and change a kernel's work."""
    keys = sorted({*TABLE.readers(), *SETTINGS} & config.changed)
    return ", ".join(f"{key} {getattr(config, key)}" for key in keys)


def _local_form(call: Call) -> Mask:
    """Return the mask's structure with arrays of one device's batch rows and heads."""
    sizes = {"B": call.batch, "N": call.heads}

    def of_device(leaf: Any, axes: str) -> jax.ShapeDtypeStruct:
        shape = tuple(sizes.get(axis, size) for axis, size in zip(axes, leaf.shape, strict=True))
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(of_device, call.mask, call.mask.leaf_axes())


def _numbers(mask: Mask) -> Iterator[tuple[int, ...]]:
    """Yield the tuples of numbers in a mask and its parts."""
    for part in mask.parts():
        yield from _numbers(part)
    values = (getattr(mask, f.name) for f in fields(mask))  # pyright: ignore[reportArgumentType]
    for value in values:
        if isinstance(value, tuple) and all(isinstance(x, int) for x in value):
            yield tuple(value)


# ---- which is faster -----------------------------------------------------------------------------


def milliseconds_of(rounds: tuple[float, ...]) -> float:
    """Return the time of a kernel, the median of its rounds."""
    return median(rounds)


def is_as_fast(one: tuple[float, ...], fastest: tuple[float, ...]) -> bool:
    """Check whether two kernels' rounds do not show which is faster."""
    if median(one) <= (1 + NOISE) * median(fastest):
        return True
    lost = sum(mine > its for mine, its in zip(one, fastest, strict=False))
    return lost < DECISIVE * min(len(one), len(fastest))


# ---- the file ------------------------------------------------------------------------------------


def times_of(device_kind: str) -> tuple[CallTimes, ...]:
    """Return the kept kernel times of a device kind, the newest last."""
    state = cache_state()
    return () if state is None else _times(state, device_kind)


@lru_cache(maxsize=8)
def _times(state: State, device_kind: str) -> tuple[CallTimes, ...]:
    kept = (m for m in sound_in(state) if not is_of_sizes(m))
    source = str(state[0])
    return tuple(call_times(m, source) for m in kept if m["device_kind"] == device_kind)


def call_times(measurement: Mapping[str, Any], source: str) -> CallTimes:
    """Read a sound measurement of kernels."""
    of = measurement
    forward, backward = (
        tuple((name, tuple(map(float, ms))) for name, ms in of[key].items())
        for key in ("forward_ms", "backward_ms")
    )
    pairs = (part.partition(" ") for part in of["versions"].split(", ") if part)
    versions = tuple((name, version) for name, _, version in pairs)
    rest = forward, backward, tuple(of["failed"].items()), of["data"], source
    return CallTimes(of["call"], of["settings"], versions, *rest)


def versions_text(packages: tuple[tuple[str, str], ...]) -> str:
    """Return as text the versions that kernel times depend on."""
    return ", ".join(f"{name} {version}" for name, version in packages)
