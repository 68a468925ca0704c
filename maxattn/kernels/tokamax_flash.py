"""tokamax's splash attention (Pallas, for TPU): like JAX's, with its own schedule, and one kernel for the backward.

Source: tokamax, ops/experimental/tpu/splash_attention; Dao et al., FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels import splash
from maxattn.kernels.base import Kernel
from maxattn.kernels.splash_calls import Library
from maxattn.kernels.splash_tokamax import TokamaxSplash
from maxattn.kernels.tokamax_mosaic import TokamaxMosaic
from maxattn.target import Target


@dataclass(frozen=True)
class TokamaxFlash(splash.Splash):
    """Compute attention with tokamax's splash; its backward is the fused one.

    Args:
        use_base2_exp: compute the softmax with exp2; the queries are then rounded once more, times log2(e).
        use_experimental_scheduler: ask the TPU's compiler for its experimental scheduler in the forward.
    """

    name: ClassVar[str] = "tokamax_flash"
    use_base2_exp: bool = False
    use_experimental_scheduler: bool = False

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse a bias, tables of pairs, arrays under | or ~, and float16 on a TPU; a GPU has Mosaic kernels."""
        if target.platform == "gpu":
            return TokamaxMosaic.supports(call, target)
        return splash.refusal("tokamax_flash", call, target)

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Say for the kernel of the platform whether its backward repeats."""
        return TokamaxMosaic.repeats(call, target) if target.platform == "gpu" else splash.Splash.repeats(call, target)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
        """Adjust the block sizes, for training and for inference; interpret on a CPU."""
        if target.platform == "gpu":
            return TokamaxMosaic.build(call, config, target)
        return TokamaxFlash.of(
            call, config, target,
            use_base2_exp=config.use_base2_exp, use_experimental_scheduler=config.use_experimental_scheduler,
        )  # fmt: skip

    def lines(self, call: Call) -> dict[str, str]:
        """Describe the kernel for `explain`."""
        extra = ", exp2" * self.use_base2_exp + ", experimental scheduler" * self.use_experimental_scheduler
        return {"runs": f"tokamax_flash (tokamax splash attention, {self.how}{extra})", "blocks": self.block_lines()}

    @property
    def library(self) -> Library:
        """tokamax's kernels."""
        return TokamaxSplash(self.interpret, self.use_base2_exp, self.use_experimental_scheduler)
