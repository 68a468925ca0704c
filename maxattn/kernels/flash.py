"""`flash`: JAX's splash attention on a TPU and a CPU, FlashAttention-4 or cuDNN on a GPU.

Splash attention (Pallas) keeps its tiles in VMEM, skips empty tiles, and takes O(T) memory forward
and backward. On an NVIDIA GPU, FlashAttention-4 runs if fa4-jax is installed, else cuDNN.

Source: jax.experimental.pallas.ops.tpu.splash_attention; Dao et al., FlashAttention-2 (arXiv
2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels.base import Grads, Inputs, Kernel, Lines, Result, Rows
from maxattn.kernels.cudnn import Cudnn
from maxattn.kernels.fa4.kernel import Fa4, HopperFa4, LibraryFa4, has_kernels, lack
from maxattn.kernels.fused.kernel import Fused
from maxattn.kernels.fused.limits import refuse_head_dim, refuse_size, written_text
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.kernels.memory_efficient import MemoryEfficient
from maxattn.kernels.splash import scalar_memory
from maxattn.kernels.splash.calls import Library
from maxattn.kernels.splash.jax_splash import JaxSplash
from maxattn.kernels.splash.kernel import Splash, refusal
from maxattn.target import Target

INSTALL = 'pip install "maxattn[fa4]", Python 3.12 or newer'


@dataclass(frozen=True)
class Flash(Splash):
    """Compute attention with JAX's splash; its backward is one kernel ("fused") or two."""

    name: ClassVar[str] = "flash"

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        if target.platform == "gpu":
            return _refusal_on_gpu(call, target)
        reason = target.refuse_untested("flash", "jax") or refusal("flash", call, target)
        return reason or scalar_memory.refuse(call, target)

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        # If cuDNN runs, its backward is not bit for bit repeatable either.
        return Fa4.repeats(call, target) if target.platform == "gpu" else None

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
        if target.platform != "gpu":
            return Flash.of(call, scalar_memory.fitting(call, config, target), target)
        if has_fa4(target):
            kernel = fa4_of(target) if call.bias is None else BiasedFa4
            return kernel.build(call, config, target)
        return CudnnForFlash(call.scale, call.return_lse, why=_without_fa4(target))

    @staticmethod
    def may_keep_dq(call: Call, platform: str) -> bool:
        return platform == "gpu" and HopperFa4.may_keep_dq(call, platform)

    def lines(self, call: Call) -> Lines:
        return Lines(f"flash (JAX splash attention, {self.how})", self.block_lines())

    @property
    def library(self) -> Library:
        return JaxSplash(self.interpret)


@dataclass(frozen=True)
class BiasedFa4(Fused):
    """Run FlashAttention-4 with an additive bias, into which every mask is written.

    Args:
        fa4: the kernel of the forward, and of the backward unless the bias has a gradient.
        plain: the kernel of the backward if the bias has a gradient; else None.
    """

    name: ClassVar[str] = "flash"
    hides_beside_bias: ClassVar[bool] = False
    takes_any_bias: ClassVar[bool] = True
    fa4: HopperFa4 = HopperFa4(1.0)  # noqa: RUF009
    plain: Kernel | None = None

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> BiasedFa4:
        # `lse_gradient` is False, since FlashAttention-4's backward computes the LSE's gradient.
        given = call, config, target
        fa4, plain = HopperFa4.build(*given), MemoryEfficient.build(*given)
        return BiasedFa4(call.scale, False, fa4, plain)

    def lines(self, call: Call) -> Lines:
        runs, forward, backward = self.fa4.lines(call)
        plain = "; memory_efficient if the bias has a gradient"
        return Lines(runs, f"{forward}; a bias is added pair by pair", backward + plain)

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        return (
            f"{written_text(call)}; FlashAttention-4 computes no gradient of a bias: if the bias"
            " needs one, memory_efficient computes the backward",
        )

    def microseconds(self, call: Call, target: Target) -> tuple[float, float] | None:
        return self.fa4.microseconds(call, target)

    def without_dbias(self) -> BiasedFa4:
        return replace(self, plain=None)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        given = super() if self.plain is None else self.plain
        return given.backward(inputs, rows)

    def rectangle_forward(self, inputs: PieceInputs) -> Result:
        return self.fa4.forward(Inputs(inputs.q, inputs.k, inputs.v, inputs.bias))

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        return self.fa4.backward(Inputs(inputs.q, inputs.k, inputs.v, inputs.bias), rows)


@dataclass(frozen=True)
class CudnnForFlash(Cudnn):
    """Run cuDNN under the name flash; `why` is the reason why fa4-jax is not called."""

    why: str = ""

    def lines(self, call: Call) -> Lines:
        return super().lines(call)._replace(runs=f"flash (cuDNN through jax: {self.why})")


def fa4_of(target: Target) -> type[Fa4]:
    return HopperFa4 if target.device.is_a("hopper") else LibraryFa4


def has_fa4(target: Target) -> bool:
    """Check whether fa4-jax is installed and has kernels for this GPU."""
    return target.version("fa4-jax") is not None and has_kernels(target.device)


def _without_fa4(target: Target) -> str:
    if not has_kernels(target.device):
        return lack(target.device)
    gain = "FlashAttention-4 took 10% to 20% less time at long lengths (H200): "
    gain = gain if target.device.is_a("hopper") else ""
    return f"fa4-jax is not installed; {gain}{install(target)}"


def install(target: Target) -> str:
    """Return the remedy that adds fa4-jax to a target."""
    return INSTALL if target.is_this_machine else target.remedy_for("fa4-jax")


def _refusal_on_gpu(call: Call, target: Target) -> Reason | None:
    if has_fa4(target):
        reason = fa4_of(target).supports(call, target)
        if reason is None and call.bias is not None:
            reason = refuse_head_dim("flash", call) or refuse_size("flash", call)
        return reason
    reason = Cudnn.supports(call, target)
    if reason is None:
        return None
    why, remedy = lack(target.device), reason.remedy
    if has_kernels(target.device):
        why, own = "fa4-jax is not installed", fa4_of(target).supports(call, target)
        remedy = f"{install(target)}; or {remedy}" if own is None else remedy
    rule = f"{why}, and cuDNN, which would run instead, refuses the call: {reason.rule}"
    return replace(reason, who="flash", rule=rule, remedy=remedy)
