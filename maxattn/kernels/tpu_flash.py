"""`tpu_flash`: attention on TPUs whose softmax needs no running maximum where that is exact.

Scores are computed transposed, with keys along the sublanes. Blocks of queries whose scores are
known to be small skip the running maximum of the online softmax (transposed/score_bound.py).
The backward computes dQ, dK and dV in one pass, from the exact LSE.

Source: Dao et al., FlashAttention-2 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from maxattn.block_sizes import BlockSizes
from maxattn.block_sizes.sizes import LANES
from maxattn.block_sizes.transposed import forward_tile, sizes_of
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.errors import Unsupported
from maxattn.kernels.base import Kernel, Lines
from maxattn.kernels.splash import scalar_memory
from maxattn.kernels.splash.calls import Library
from maxattn.kernels.splash.kernel import Splash, asked_sizes, refusal
from maxattn.kernels.transposed.library import Transposed
from maxattn.kernels.transposed.scalar_memory import rule_of
from maxattn.target import Target
from maxattn.tuned import tuned_config


@dataclass(frozen=True)
class TpuFlash(Splash):
    """Compute attention with scores that are transposed, forward and backward.

    Args:
        v_is_turned: transpose V before the forward's kernel, not inside.
    """

    name: ClassVar[str] = "tpu_flash"
    rows_at_once: ClassVar[bool] = True
    v_is_turned: bool = False

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse a bias, tables of pairs, arrays under | or ~, and float16 on a TPU."""
        reason = target.refuse_untested("tpu_flash", "jax") or refusal("tpu_flash", call, target)
        return reason or _refuse_length(call, target)

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
        config = tuned_config(config, TpuFlash.name, call, target)
        float32 = config.float32_qk_product
        local = call.derived(dtype="float32") if float32 else call
        training, inference = (
            asked_sizes(config, local, "tpu_flash", target, t) for t in (True, False)
        )
        sizes, changes = sizes_of(training, local, target)
        tile, of_forward = forward_tile(inference, local, target)
        if (rule := rule_of(local, tile, target)) is not None:
            what = f"{tile[0]} queries x {tile[1]} keys"
            raise Unsupported("flash_block_sizes", what, rule, scalar_memory.REMEDY)
        interpret, core = target.platform == "cpu", target.device.core
        turned = core is not None and core.side == LANES
        both = call.scale, sizes, interpret, float32, changes
        return TpuFlash(*both, BlockSizes(*tile), of_forward, v_is_turned=turned)

    def lines(self, call: Call) -> Lines:
        return Lines(f"tpu_flash (transposed, {self.how})", self.block_lines())

    @property
    def library(self) -> Library:
        return Transposed(self.interpret, self.v_is_turned)


def _refuse_length(call: Call, target: Target) -> Reason | None:
    """Refuse a call whose lists of tiles do not fit with the usual tile."""
    tile, _ = forward_tile(FlashBlockSizes(), call, target)
    rule = rule_of(call, tile, target)
    return None if rule is None else Reason("tpu_flash", "length", rule, scalar_memory.REMEDY)
