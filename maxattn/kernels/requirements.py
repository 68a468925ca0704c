"""What a target lacks for a kernel, and what would bring it."""

from __future__ import annotations

from maxattn.call import Reason
from maxattn.jax_private.versions import TESTED, Versions
from maxattn.kernels.table import EXTRAS, TABLE, KernelRow
from maxattn.target import Target

_PLATFORMS = {"cpu": "a CPU", "tpu": "a TPU"}


def missing(kernel: str, target: Target) -> Reason | None:
    """Return the first thing that the target lacks for a kernel, or None."""
    row = TABLE[kernel]
    return _wrong_device(row, target) or _switched_off(row, target) or _no_package(row, target)


def _wrong_device(row: KernelRow, target: Target) -> Reason | None:
    vendor = target.device.vendor
    if target.platform in row.platforms and (target.platform != "gpu" or vendor in row.gpus):
        return None
    rule = f"it needs {_devices(row)}, and this is {target.device_kind}"
    return Reason(row.name, "platform", rule, "use attention: auto")


def _devices(row: KernelRow) -> str:
    """Name what a kernel runs on, for example "a CPU, an NVIDIA GPU or a TPU"."""
    names = _PLATFORMS | {"gpu": f"an {' or '.join(row.gpus)} GPU"}
    *others, last = [names[platform] for platform in row.platforms]
    return f"{', '.join(others)} or {last}" if others else last


def _switched_off(row: KernelRow, target: Target) -> Reason | None:
    if not row.switch or dict(target.env).get(row.switch) != "0":
        return None
    rule = f"{row.switch}=0 in the environment forbids it"
    return Reason(row.name, row.switch, rule, f"unset {row.switch}")


def _no_package(row: KernelRow, target: Target) -> Reason | None:
    if not row.package or target.version(row.package) is not None:
        return None
    named = f"was not named among the {target.device_kind}'s packages"
    lacks = "is not installed" if is_here(target) else named
    return Reason(row.name, "package", f"{row.package} {lacks}", remedy(row.package, target))


def untested(
    kernel: str, package: str, target: Target, tested: Versions | None = None
) -> Reason | None:
    """Refuse a version of a package that a kernel, which takes hold of its insides, was not tested
    with.

    Args:
        kernel: its name.
        package: pip's name, one of `versions.TESTED`.
        target: whose version is judged; none that is not known there.
        tested: the versions that will do; default those of `versions.TESTED`.
    """
    version, tested = target.version(package), tested or TESTED[package]
    if version is None or tested.hold(version):
        return None
    rule = f"it uses what {package} keeps private, was tested with {tested}, and this is {version}"
    plain = package not in EXTRAS
    bring = f'pip install "{package}{tested}"' if plain else remedy(package, target)
    return Reason(kernel, "version", rule, f"{bring}; or use attention: auto")


def is_here(target: Target) -> bool:
    """Tell whether a target's packages were looked up on this machine: jax is then among them."""
    return target.version("jax") is not None


def remedy(package: str, target: Target, least: str = "") -> str:
    """Say how a target comes by a package: pip brings it here; a named target has what is said of
    it.

    Args:
        package: pip's name.
        target: that lacks it, or has it too old.
        least: the version that pip must bring, where an older one is there.
    """
    extra, version = EXTRAS.get(package, ("", ""))
    if is_here(target):
        install = f'"maxattn[{extra}]"' if extra else package
        return f'pip install "{package}>={least}"' if least else f"pip install {install}"
    named = f"{package}={version}" if version else package
    return f"add --with {named}, in Python packages= of Target.named"
