"""The machine a plan is made for, as a value: platform, device kind, versions, the few environment
facts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from typing import Literal

from maxattn.errors import ConfigError, did_you_mean
from maxattn.tuned import Tuned, table_of

Platform = Literal["cpu", "gpu", "tpu"]

# Distribution names as pip knows them; the import name may differ.
PACKAGES = ("jax", "tokamax", "fa4-jax", "transformer-engine-jax")
ENVIRONMENT = ("NVTE_FUSED_ATTN", "LIBTPU_INIT_ARGS", "XLA_FLAGS")

# Spelling of jax's `device_kind` -> platform. Aliases are what people say.
KNOWN: dict[str, Platform] = {
    "cpu": "cpu",
    "TPU v4": "tpu",
    "TPU v5e": "tpu",
    "TPU v5p": "tpu",
    "TPU v6e": "tpu",
    "TPU v7x": "tpu",
    "NVIDIA A100": "gpu",
    "NVIDIA H100": "gpu",
    "NVIDIA H200": "gpu",
    "NVIDIA B200": "gpu",
}
GIB = 2**30
# Bytes that a program may use on one device. TPUs: what libtpu 0.0.42 says when a program needs
# more ("exceeds available HBM (95.74G)"); of v7x, a device is half a chip. GPUs: the card's memory
# as its maker sells it.
HBM: dict[str, float] = {
    "TPU v4": 30.75 * GIB,
    "TPU v5e": 15.75 * GIB,
    "TPU v5p": 95.74 * GIB,
    "TPU v6e": 31.25 * GIB,
    "TPU v7x": 94.75 * GIB,
    "NVIDIA A100": 80e9,
    "NVIDIA H100": 80e9,
    "NVIDIA H200": 141e9,
    "NVIDIA B200": 180e9,
}
# Dense bfloat16 FLOP/s of one device, as its maker gives them. Of v7x the maker gives a chip's,
# 2307e12: libtpu lists each of its two cores as a device, with half of the products, of the memory
# and of the memory's rate. (Of v4 and v5p a program's device is a whole chip, though a bare
# topology of v4 lists two cores.)
PEAK: dict[str, float] = {
    "TPU v4": 275e12, "TPU v5e": 197e12, "TPU v5p": 459e12, "TPU v6e": 918e12, "TPU v7x": 1153e12,
    "NVIDIA A100": 312e12, "NVIDIA H100": 989e12, "NVIDIA H200": 989e12, "NVIDIA B200": 2250e12,
}  # fmt: skip
_PLATFORM_DEFAULT = {"cpu": "cpu", "gpu": "NVIDIA H100", "tpu": "TPU v5p"}
_DEVICE_KIND_ALIASES = {
    "TPU v5 lite": "TPU v5e",
    "TPU v5": "TPU v5p",
    "TPU v6 lite": "TPU v6e",
    "TPU7x": "TPU v7x",
}


@dataclass(frozen=True)
class Target:
    """Say which machine a plan is for.

    Args:
        platform: "cpu", "gpu" (NVIDIA) or "tpu".
        device_kind: for example "TPU v5p" or "NVIDIA H200".
        packages: (name, version) of the optional packages that are there.
        env: (name, value) of the environment facts that can refuse a kernel, give a TPU's kernels
            more memory, or say how a ring's blocks travel.
        tuned: sizes that `maxattn tune` measured on it, for what a config leaves open.
    """

    platform: Platform
    device_kind: str
    packages: tuple[tuple[str, str], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    tuned: tuple[Tuned, ...] = ()

    @staticmethod
    def here() -> Target:
        """Describe this machine, or the target of a surrounding `assumed()`. Initialises jax's
        backend.
        """
        if (assumed := _ASSUMED.get()) is not None:
            return assumed
        here = _here(tuple((k, os.environ[k]) for k in ENVIRONMENT if k in os.environ))
        return _with_tuned(here, table_of(here.device_kind, here.packages))

    @staticmethod
    def named(kind: str, packages: tuple[tuple[str, str], ...] = ()) -> Target:
        """Describe a machine that need not be there.

        Args:
            kind: a name of `KNOWN` ("TPU v5p", "NVIDIA H200", "cpu"), or a platform ("tpu", "gpu").
            packages: optional packages it has, as (name, version).

        Raises:
            ConfigError: for a name that is not known.
        """
        kind = _PLATFORM_DEFAULT.get(kind, kind)
        if kind not in KNOWN:
            known = ", ".join(KNOWN)
            raise ConfigError(
                "target",
                kind,
                f"it must be one of {known}",
                did_you_mean(kind, KNOWN) or "take a name from that list",
            )
        return Target(KNOWN[kind], kind, packages)

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """Make plans for this target inside a `with`: to trace and compile for a machine that is
        not there.
        """
        token = _ASSUMED.set(self)
        try:
            yield
        finally:
            _ASSUMED.reset(token)

    def version(self, package: str) -> str | None:
        """Return the version of an optional package, or None where it is not installed."""
        return dict(self.packages).get(package)


_ASSUMED: ContextVar[Target | None] = ContextVar(
    "the target of a surrounding assumed()", default=None
)


@lru_cache(maxsize=8)
def _with_tuned(here: Target, table: tuple[Tuned, ...]) -> Target:
    """Add what was measured; not over several processes, whose files may differ and whose programs
    must not.
    """
    import jax

    return replace(here, tuned=table) if table and jax.process_count() == 1 else here


@lru_cache(maxsize=8)
def _here(env: tuple[tuple[str, str], ...]) -> Target:
    import jax

    backend = jax.default_backend()
    platform: Platform = (
        "gpu" if backend in ("gpu", "cuda", "rocm") else "tpu" if backend == "tpu" else "cpu"
    )
    return Target(platform, device_kind(str(jax.devices()[0].device_kind)), installed(), env)


def device_kind(spelling: str) -> str:
    """Return our name of what jax calls a device."""
    return _DEVICE_KIND_ALIASES.get(spelling, spelling)


def known_kind(kind: str) -> str | None:
    """Return the name of `KNOWN` whose figures hold for a device, for example of an "NVIDIA H100
    80GB HBM3"; or None.

    Args:
        kind: jax's name of it, or ours.
    """
    kind = device_kind(kind)
    return next(
        (name for name in KNOWN if kind == name or kind.startswith((f"{name} ", f"{name}-"))), None
    )


def installed() -> tuple[tuple[str, str], ...]:
    """List the optional packages that are installed here, with their versions."""
    found = []
    for name in PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)
