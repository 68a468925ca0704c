"""`tpu_flash`: attention on TPUs without a running maximum, if scores are small enough.

Scores are transposed, with keys along the sublanes. Query blocks whose scores are known to be small
skip the running maximum of the online softmax, with exact results (transposed/tile.py). The
backward computes dQ, dK and dV in one pass over the tiles, from the exact LSE.

Source: Dao et al., FlashAttention-2 (arXiv 2307.08691), section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Array

from maxattn.block_sizes import BlockSizes
from maxattn.block_sizes.sizes import LANES
from maxattn.block_sizes.transposed import forward_tile, sizes_of
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig, FlashBlockSizes
from maxattn.kernels.base import Kernel, Lines
from maxattn.kernels.softmax import LOG2E
from maxattn.kernels.splash import scalar_memory
from maxattn.kernels.splash.calls import Blocks, Library, Operands, Setup, Stats
from maxattn.kernels.splash.kernel import Splash, asked_sizes, refusal
from maxattn.kernels.transposed.backward import backward
from maxattn.kernels.transposed.forward import forward
from maxattn.target import Target
from maxattn.tuned import tuned_config


@dataclass(frozen=True)
class TpuFlash(Splash):
    """Compute attention with transposed scores."""

    name: ClassVar[str] = "tpu_flash"
    rows_at_once: ClassVar[bool] = True
    # whether V is transposed before the forward kernel; else inside the kernel
    v_is_turned: bool = False

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        reason = target.refuse_untested("tpu_flash", "jax") or refusal("tpu_flash", call, target)
        if reason is not None:
            return reason
        tile, _ = forward_tile(FlashBlockSizes(), call, target)
        rule = scalar_memory.transposed_rule(call, tile, target)
        return None if rule is None else Reason("tpu_flash", "length", rule, scalar_memory.REMEDY)

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
        if (rule := scalar_memory.transposed_rule(local, tile, target)) is not None:
            raise scalar_memory.unsupported(tile, rule)
        interpret, core = target.platform == "cpu", target.device.core
        turned = core is not None and core.side == LANES
        both = call.scale, sizes, interpret, float32, changes
        return TpuFlash(*both, BlockSizes(*tile), of_forward, v_is_turned=turned)

    def lines(self, call: Call) -> Lines:
        return Lines(f"tpu_flash (transposed, {self.how})", self.block_lines())

    @property
    def library(self) -> Library:
        return Transposed(self.interpret, self.v_is_turned)


@dataclass(frozen=True)
class Transposed(Library):
    """Call the kernels: a forward on one batch row, and a backward on all batch rows at once."""

    interpret: bool  # whether to run in Pallas' interpreter
    # whether V is transposed before the forward kernel; else inside the kernel
    v_is_turned: bool = False

    def query_factor(self, dtype: Any) -> float:
        return LOG2E  # for exp2

    def forward(self, row: Operands, setup: Setup, blocks: Blocks) -> tuple[Array, Array]:
        return forward(row, setup, blocks, self.interpret, self.v_is_turned)

    def dkv(
        self, row: Operands, stats: Stats, setup: Setup, blocks: Blocks, fused: bool
    ) -> tuple[Array | None, Array, Array]:
        assert fused, "tpu_flash has no other backward"
        return backward(row, stats, setup, blocks, self.interpret)
