"""`tokamax_flash`: tokamax's splash attention on a TPU and a CPU, its Mosaic kernels on a GPU.

tokamax's splash attention is like JAX's, with another schedule; its backward is one kernel.

Source: tokamax, splash_attention; Dao et al., FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.jax_private.versions import TOKAMAX_ON_GPU, TOKAMAX_SPLASH
from maxattn.kernels.base import Kernel, Lines
from maxattn.kernels.fused.tokamax_mosaic import TokamaxMosaic
from maxattn.kernels.splash.calls import Library
from maxattn.kernels.splash.kernel import Splash, refusal
from maxattn.kernels.splash.tokamax import TokamaxSplash
from maxattn.target import Target

UNSAID = "?"  # the version if the command line has `--with tokamax` without a version


@dataclass(frozen=True)
class TokamaxFlash(Splash):
    """Compute attention with tokamax's splash, whose backward is fused."""

    name: ClassVar[str] = "tokamax_flash"
    reaches: ClassVar[float] = 0.85  # H200, 32,760 tokens: 551 to 575 TFLOP/s
    # whether to compute the softmax with exp2; the queries, multiplied by log2(e), are then rounded
    # once more
    use_base2_exp: bool = False
    # whether the compiler uses that scheduler for the forward
    use_experimental_scheduler: bool = False

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        if target.platform == "gpu":
            return _with_remedy(TokamaxMosaic.supports(call, target), target)
        reason = target.refuse_untested("tokamax_flash", "tokamax", TOKAMAX_SPLASH)
        return reason or refusal("tokamax_flash", call, target)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
        if target.platform == "gpu":
            return TokamaxMosaic.build(call, config, target)
        settings = {
            "use_base2_exp": config.use_base2_exp,
            "use_experimental_scheduler": config.use_experimental_scheduler,
        }
        return TokamaxFlash.of(call, config, target, **settings)

    def lines(self, call: Call) -> Lines:
        extra = ", exp2" * self.use_base2_exp
        extra += ", experimental scheduler" * self.use_experimental_scheduler
        runs = f"tokamax_flash (tokamax splash attention, {self.how}{extra})"
        return Lines(runs, self.block_lines())

    @property
    def library(self) -> Library:
        return TokamaxSplash(self.interpret, self.use_base2_exp, self.use_experimental_scheduler)


def _with_remedy(reason: Reason | None, target: Target) -> Reason | None:
    """Replace the remedy in a refusal of tokamax's version by the target's remedy."""
    if reason is None or reason.feature != "package":
        return reason
    if target.version("tokamax") == UNSAID:
        rule = f"it needs tokamax {TOKAMAX_ON_GPU} or newer on a GPU, and no version is given"
        reason = replace(reason, rule=rule)
    remedy = reason.remedy if target.is_this_machine else target.remedy_for("tokamax")
    return replace(reason, remedy=remedy)
