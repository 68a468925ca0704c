"""`tpu_flash`: attention on TPUs whose softmax needs no running maximum where that is exact.

Scores are computed transposed, with keys along the sublanes. Blocks of queries whose scores are
known to be small skip the running maximum of the online softmax (transposed/score_bound.py).
The backward is that of JAX's splash attention.

Source: Dao et al., FlashAttention-2 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import e, log2
from typing import Any, ClassVar

from maxattn.block_sizes import FORWARD, BlockSizes, adjust
from maxattn.block_sizes.sizes import LANES
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.errors import Unsupported
from maxattn.kernels.base import Kernel, Lines
from maxattn.kernels.requirements import untested
from maxattn.kernels.splash import scalar_memory
from maxattn.kernels.splash.calls import Library
from maxattn.kernels.splash.kernel import Splash, refusal
from maxattn.kernels.transposed.library import TransposedForward
from maxattn.kernels.transposed.scalar_memory import rule_of
from maxattn.kernels.transposed.sizes import forward_tile
from maxattn.target import Target

LOG2E = log2(e)


@dataclass(frozen=True)
class TpuFlash(Splash):
    """Compute attention with a transposed forward, and the backward of JAX's splash.

    Args:
        v_is_turned: transpose V before the forward's kernel, not inside.
    """

    name: ClassVar[str] = "tpu_flash"
    v_is_turned: bool = False

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse a bias, tables of pairs, arrays under | or ~, and float16 on a TPU."""
        reason = untested("tpu_flash", "jax", target) or refusal("tpu_flash", call, target)
        return reason or _refuse_length(call, target)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
        """Choose the forward's tile, adjust the backward's; interpret on a CPU."""
        asked, float32 = config.flash_block_sizes, config.float32_qk_product
        local = call.derived(dtype="float32") if float32 else call
        tile, changes = forward_tile(asked, local, target)
        if (rule := rule_of(local, tile, target)) is not None:
            what = f"{tile[0]} queries x {tile[1]} keys"
            raise Unsupported("flash_block_sizes", what, rule, scalar_memory.REMEDY)
        sizes, backward = adjust(asked, local, "flash", target, training=True)
        sizes = replace(sizes, **dict(zip(FORWARD, tile, strict=True)))
        kept = tuple(change for change in backward if change.key not in FORWARD)
        interpret, core = target.platform == "cpu", target.device.core
        forward = {"inference": BlockSizes(*tile), "inference_changes": changes}
        turned = core is not None and core.side == LANES
        both = changes + kept
        return TpuFlash(call.scale, sizes, interpret, float32, both, **forward, v_is_turned=turned)

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        return Lines(f"tpu_flash (transposed, {self.how})", self.block_lines())

    @property
    def library(self) -> Library:
        """The kernels."""
        return TransposedForward(self.interpret, self.v_is_turned)

    def forward_factor(self, dtype: Any) -> float:
        """Compute the softmax with exp2."""
        return LOG2E


def _refuse_length(call: Call, target: Target) -> Reason | None:
    """Refuse a call whose lists of tiles do not fit with the usual tile."""
    tile, _ = forward_tile(FlashBlockSizes(), call, target)
    rule = rule_of(call, tile, target)
    return None if rule is None else Reason("tpu_flash", "length", rule, scalar_memory.REMEDY)
