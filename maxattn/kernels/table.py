"""What each kernel of the field needs before it can run: facts that a plan states when one is
missing.
"""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.call import Reason
from maxattn.target import Target


@dataclass(frozen=True)
class Requirement:
    """Name the platforms and the package that a kernel needs.

    Args:
        platforms: where it can run.
        package: pip's name of what it calls, one of `EXTRAS`; None when jax alone suffices.
        switch: an environment variable whose value "0" forbids it.
    """

    platforms: tuple[str, ...]
    package: str | None = None
    switch: str | None = None


REQUIREMENTS: dict[str, Requirement] = {
    "dot_product": Requirement(("cpu", "gpu", "tpu")),
    "memory_efficient": Requirement(("cpu", "gpu", "tpu")),
    "flash": Requirement(("cpu", "gpu", "tpu")),
    "tokamax_flash": Requirement(("cpu", "gpu", "tpu"), "tokamax"),
    "cudnn_flash_te": Requirement(("gpu",), "transformer-engine-jax", "NVTE_FUSED_ATTN"),
    "cudnn": Requirement(("gpu",)),
}
# pip's name -> the extra of maxattn that brings it, and a version that every kernel here can call.
EXTRAS = {
    "tokamax": ("tokamax", "0.0.17"),
    "transformer-engine-jax": ("te", "2.20.2"),
    "fa4-jax": ("fa4", "0.1.0"),
}
_PLATFORM_NAMES = {"cpu": "a CPU", "gpu": "an NVIDIA GPU", "tpu": "a TPU"}


def missing(kernel: str, target: Target) -> Reason | None:
    """Return the first thing that the target lacks for a kernel, or None."""
    need = REQUIREMENTS[kernel]
    if target.platform not in need.platforms:
        where = " or ".join(_PLATFORM_NAMES[p] for p in need.platforms)
        return Reason(
            kernel,
            "platform",
            f"it needs {where}, and this is {target.device_kind}",
            "use attention: auto",
        )
    if need.switch and dict(target.env).get(need.switch) == "0":
        return Reason(
            kernel,
            need.switch,
            f"{need.switch}=0 in the environment forbids it",
            f"unset {need.switch}",
        )
    if need.package and target.version(need.package) is None:
        lacks = (
            "is not installed"
            if is_here(target)
            else f"was not named among the {target.device_kind}'s packages"
        )
        return Reason(kernel, "package", f"{need.package} {lacks}", remedy(need.package, target))
    return None


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
    extra, version = EXTRAS[package]
    if is_here(target):
        return f'pip install "{package}>={least}"' if least else f'pip install "maxattn[{extra}]"'
    return f"add --with {package}={version}, in Python packages= of Target.named"
