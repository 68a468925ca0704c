"""What `flash` is on an NVIDIA GPU: FlashAttention-4 where fa4-jax is installed, cuDNN through jax
where it is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Kernel, Lines
from maxattn.kernels.cudnn import Cudnn
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.table import is_here, remedy
from maxattn.target import Target

INSTALL = 'pip install "maxattn[fa4]", Python 3.12 or newer'


@dataclass(frozen=True)
class CudnnForFlash(Cudnn):
    """Run cuDNN under the name of flash, and say what is lost by it.

    Args:
        remedy: what would bring fa4-jax.
    """

    remedy: str = INSTALL

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        gain = "FlashAttention-4 took 10% to 20% less time at long lengths (H200)"
        lost = f"fa4-jax is not installed; {gain}: {self.remedy}"
        return super().lines(call)._replace(runs=f"flash (cuDNN through jax: {lost})")


def install(target: Target) -> str:
    """Say how a target comes by fa4-jax."""
    return INSTALL if is_here(target) else remedy("fa4-jax", target)


def has_fa4(target: Target) -> bool:
    """Tell whether FlashAttention-4 can be called."""
    return target.version("fa4-jax") is not None


def supports(call: Call, target: Target) -> Reason | None:
    """Ask FlashAttention-4 where it is installed, else cuDNN."""
    if has_fa4(target):
        return Fa4.supports(call, target)
    reason = Cudnn.supports(call, target)
    if reason is None:
        return None
    rule = f"fa4-jax is not installed, and cuDNN in its place: {reason.rule}"
    return replace(reason, who="flash", rule=rule, remedy=f"{install(target)}; or {reason.remedy}")


def repeats(call: Call, target: Target) -> Reason | None:
    """Refuse: both add gradients up in no fixed order."""
    return Fa4.repeats(call, target)


def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
    """Decide which of the two runs."""
    if has_fa4(target):
        return Fa4.build(call, config, target)
    return CudnnForFlash(call.scale, call.return_lse, install(target))
