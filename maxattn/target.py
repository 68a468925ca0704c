"""`Target`: the machine that a plan is made for, this machine or a named one, as a value."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from typing import Any

from maxattn.config.errors import plain
from maxattn.config.target_names import read_target
from maxattn.devices import DEVICES, Device, Platform, device_kind, device_of
from maxattn.devices.families import read_capability
from maxattn.errors import ConfigError, Reason
from maxattn.jax_private.versions import CUDNN, CUTLASS, TESTED, Versions, aiter_in_jax
from maxattn.kernels import table
from maxattn.tuned import Tuned, table_of
from maxattn.tuned.kernels import CallTimes, times_of

Pairs = tuple[tuple[str, str], ...]

# Environment variables that give a TPU's kernels more memory, or set how a ring's blocks are sent;
# kernels/table.py has the variables that forbid kernels.
ENVIRONMENT = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")


@dataclass(frozen=True)
class Target:
    """The machine that a plan is made for: this machine, or one that need not be available.

    >>> ma.Target.named("NVIDIA H200", packages={"fa4-jax": "0.1.0"}).version("fa4-jax")
    '0.1.0'
    >>> ma.Target.named("TPU v5p").device.memory / 2**30
    95.74

    Args:
        platform: "cpu", "gpu" or "tpu".
        device_kind: for example "TPU v5p" or "NVIDIA H200".
        packages: (name, version) of installed optional packages, cuDNN and AITER; default none.
        env: (name, value) of environment variables that can forbid a kernel, give a TPU's kernels
            more memory, or set how a ring's blocks are sent; default none.
        tuned: block sizes that `maxattn tune` measured on this machine; block sizes in a config
            take precedence; default none.
        capability: compute capability of an NVIDIA GPU, for example "10.3"; default "", which means
            the usual capability of the device kind.
        kernel_times: times that `maxattn tune` measured on this machine, by which `attention: auto`
            chooses the fastest kernel; default none.
        sms: number of streaming multiprocessors (SMs) of a GPU, or of a part of a GPU (MIG);
            default 0, which means the usual number of the device kind.
    """

    platform: Platform
    device_kind: str
    packages: Pairs = ()
    env: Pairs = ()
    tuned: tuple[Tuned, ...] = ()
    capability: str = ""
    kernel_times: tuple[CallTimes, ...] = ()
    sms: int = 0

    def __post_init__(self) -> None:
        # A target is hashed, so mappings and lists become tuples.
        for setting in ("packages", "env"):
            object.__setattr__(self, setting, _pairs(setting, getattr(self, setting)))
        for setting in ("tuned", "kernel_times"):
            object.__setattr__(self, setting, tuple(getattr(self, setting)))

    @staticmethod
    def here() -> Target:
        """Return this machine, or the target of a surrounding `assumed()`.

        The call initialises jax's backend.
        """
        if (assumed := _ASSUMED.get()) is not None:
            return assumed
        names = (*table.switches(), *ENVIRONMENT)
        here = _here(tuple((k, os.environ[k]) for k in names if k in os.environ), installed())
        sizes = table_of(here.device_kind, here.packages)
        return _with_tuned(here, sizes, times_of(here.device_kind))

    @staticmethod
    def named(kind: str, packages: Mapping[str, str] | Sequence[Sequence[str]] = ()) -> Target:
        """Return a machine by name; it need not be available.

        Args:
            kind: a name in `devices.DEVICES` ("TPU v5p", "NVIDIA H200", "cpu"), a short name
                ("v5p", "H200"), or a platform ("tpu", "gpu") for its usual device.
            packages: optional packages that the machine has, as {name: version} or pairs (name,
                version); default none.

        Raises:
            ConfigError: the name is unknown, or `packages` are no names and versions.

        >>> ma.Target.named("H200", packages={"fa4-jax": "0.1.0"}).packages
        (('fa4-jax', '0.1.0'),)
        """
        kind = read_target(kind).kind
        return Target(DEVICES[kind].platform, kind, _pairs("packages", packages))

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """Make plans for this target inside a `with`, to trace for an unavailable machine."""
        token = _ASSUMED.set(self)
        try:
            yield
        finally:
            _ASSUMED.reset(token)

    @property
    def device(self) -> Device:
        """The row of the target's device kind in `devices.DEVICES`."""
        capability = read_capability(self.capability)
        return device_of(self.device_kind, self.platform, capability, self.sms)

    def untuned(self) -> Target:
        """Return the same machine without its measured block sizes and times."""
        return replace(self, tuned=(), kernel_times=())

    def version(self, package: str) -> str | None:
        """Return the version of an optional package, or None if it is not installed."""
        return dict(self.packages).get(package)

    @property
    def is_this_machine(self) -> bool:
        """Whether the target is this machine: only `here()` lists jax among the packages."""
        return self.version("jax") is not None

    def refuse_untested(
        self, who: str, package: str, tested: Versions | None = None
    ) -> Reason | None:
        """Refuse a package's untested version if the kernel `who` uses the package's private names.

        An unknown version is not refused. `tested` is the range of tested versions, default the
        package's range in `versions.TESTED`.
        """
        version, tested = self.version(package), tested or TESTED[package]
        if version is None or tested.hold(version):
            return None
        rule = (
            f"it uses private names of {package} and was tested with {tested}, not with {version}"
        )
        plain = package not in table.EXTRAS
        bring = f'pip install "{package}{tested}"' if plain else self.remedy_for(package)
        return Reason(who, "version", rule, f"{bring}; or use attention: auto")

    def remedy_for(self, package: str) -> str:
        """Return the remedy that adds a package: a pip command, or an option of a named target."""
        extra, version = table.EXTRAS.get(package, ("", ""))
        if self.is_this_machine:
            return "pip install " + (f'"maxattn[{extra}]"' if extra else package)
        named = f"{package}={version}" if version else package
        return f"add --with {named}, in Python packages= of Target.named"


def _pairs(setting: str, given: Any) -> Pairs:
    """Return the pairs of text of a mapping or of a sequence of pairs; refuse any other value."""
    pairs = tuple(given.items()) if isinstance(given, Mapping) else given
    if isinstance(pairs, list | tuple):
        found = tuple(tuple(pair) if isinstance(pair, list) else pair for pair in pairs)
        if all(isinstance(p, tuple) and len(p) == 2 for p in found) and all(
            isinstance(text, str) for pair in found for text in pair
        ):
            return found
    if setting == "env":
        rule, remedy = "it must have text as names and values", "pass env={name: value}"
    else:
        rule = "it must have names and versions of packages, both as text"
        remedy = 'pass packages={name: version}, such as {"fa4-jax": "0.1.0"}'
    raise ConfigError(setting, plain(given), rule, remedy)


_ASSUMED: ContextVar[Target | None] = ContextVar("the target of assumed()", default=None)


@lru_cache(maxsize=8)
def _with_tuned(
    here: Target, table: tuple[Tuned, ...], times: tuple[CallTimes, ...] = ()
) -> Target:
    """Return this machine with the block sizes and kernel times that were measured on it.

    With several processes, measurements are left out: hosts' files may differ, programs must not.
    """
    import jax

    has_any = bool(table or times) and jax.process_count() == 1
    return replace(here, tuned=table, kernel_times=times) if has_any else here


_PLATFORMS: dict[str, Platform] = {"gpu": "gpu", "cuda": "gpu", "rocm": "gpu", "tpu": "tpu"}


@lru_cache(maxsize=8)
def _here(env: Pairs, packages: Pairs) -> Target:
    import jax

    platform, device = _PLATFORMS.get(jax.default_backend(), "cpu"), jax.devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    known = capability if platform == "gpu" and read_capability(capability) else ""
    sms = (getattr(device, "core_count", 0) or 0) if platform == "gpu" else 0
    return Target(platform, _kind_of(device), packages, env, capability=known, sms=sms)


def _kind_of(device: Any) -> str:
    """Return maxattn's name of a device's kind; the name of a ROCm device begins with "AMD"."""
    kind = str(device.device_kind)
    is_amd = "rocm" in str(device.client.platform_version).lower()
    if is_amd and device_of(kind).vendor != "AMD":
        kind = f"AMD {kind}"
    return device_kind(kind)


def installed() -> Pairs:
    """Return (name, version) of jax, cuDNN, AITER, CuTe and the kernels' packages, if installed."""
    return _installed(("jax", *table.packages(), CUTLASS, *CUDNN))


@lru_cache(maxsize=8)
def _installed(names: tuple[str, ...]) -> Pairs:
    found = []
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found.append((name, metadata.version(name)))
    return (*found, *aiter_in_jax())
