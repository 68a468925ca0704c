"""What each kernel of the field needs before it can run: facts that a plan states when one is missing."""

from __future__ import annotations

from dataclasses import dataclass

from maxattn.call import Reason
from maxattn.target import Target


@dataclass(frozen=True)
class Requirement:
    """Name the platforms, the package and the extra that a kernel needs.

    Args:
        platforms: where it can run.
        package: pip's name of what it calls, on `package_platforms`; None when jax alone suffices.
        extra: the extra of maxattn that brings the package.
        switch: an environment variable whose value "0" forbids it.
    """

    platforms: tuple[str, ...]
    package: str | None = None
    extra: str | None = None
    switch: str | None = None


REQUIREMENTS: dict[str, Requirement] = {
    "dot_product": Requirement(("cpu", "gpu", "tpu")),
    "memory_efficient": Requirement(("cpu", "gpu", "tpu")),
    "flash": Requirement(("cpu", "gpu", "tpu")),
    "tokamax_flash": Requirement(("cpu", "gpu", "tpu"), "tokamax", "tokamax"),
    "cudnn_flash_te": Requirement(("gpu",), "transformer-engine-jax", "te", "NVTE_FUSED_ATTN"),
    "cudnn": Requirement(("gpu",)),
}
_PLATFORM_NAMES = {"cpu": "a CPU", "gpu": "an NVIDIA GPU", "tpu": "a TPU"}


def missing(kernel: str, target: Target) -> Reason | None:
    """Return the first thing that the target lacks for a kernel, or None."""
    need = REQUIREMENTS[kernel]
    if target.platform not in need.platforms:
        where = " or ".join(_PLATFORM_NAMES[p] for p in need.platforms)
        return Reason(kernel, "platform", f"it needs {where}, and this is {target.device_kind}", "use attention: auto")
    if need.switch and dict(target.env).get(need.switch) == "0":
        return Reason(kernel, need.switch, f"{need.switch}=0 in the environment forbids it", f"unset {need.switch}")
    if need.package and target.version(need.package) is None:
        return Reason(kernel, "package", f"{need.package} is not installed", f'pip install "maxattn[{need.extra}]"')
    return None
