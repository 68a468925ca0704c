"""JAX's splash attention (Pallas, for TPU): tiles in VMEM, empty tiles skipped, O(T) memory both ways.

It calls splash's forward and backward kernels themselves, not its public function, so that a backward can be given
the output and LSE of a merge over many calls, and the gradient of the LSE:

    delta = sum(dout * out) - dlse        dS = P * (dP - delta)

Around them: lengths padded to tiles, masks as `MaskInfo` and segment ids, the scale, rows with nothing to attend to.

Source: jax.experimental.pallas.ops.tpu.splash_attention; Dao et al., FlashAttention-2 (arXiv 2307.08691).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.block_sizes import BlockSizes, Change, adjust
from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.kernels import splash_mask as sm
from maxattn.kernels.base import Bias, Offset
from maxattn.kernels.softmax import NEG_INF, row_gradient
from maxattn.kernels.splash_calls import Problem
from maxattn.masks import Mask
from maxattn.target import Target

# Splash's LSE of a row without a key it may attend to: about -2.4e38, or -inf where no tile was visited at all.
NOTHING_SEEN = -1e37


@dataclass(frozen=True)
class Flash:
    """Compute out = softmax(scale * q k^T) v with splash attention.

    Args:
        scale: multiplies the queries, in float32, before they are rounded to their dtype.
        blocks: tile sizes of the forward and backward kernels.
        interpret: run the kernels in Pallas' interpreter, on a CPU.
        float32_qk_product: cast q, k and v to float32 before the kernel.
        changes: how the block sizes differ from those that were asked for.
    """

    name: ClassVar[str] = "flash"
    scale: float
    blocks: BlockSizes
    interpret: bool = False
    float32_qk_product: bool = False
    changes: tuple[Change, ...] = ()

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse a bias, tables of pairs, arrays under | or ~, NVIDIA GPUs, and float16 on a TPU."""
        if target.platform == "gpu":
            rule = f"it runs on a TPU (and in interpret mode on a CPU), and this is {target.device_kind}"
            return Reason("flash", "platform", rule, "set attention: auto")
        if target.platform == "tpu" and call.dtype == "float16":
            rule = "the TPU's compiler takes no float16 in it"
            return Reason("flash", "dtype float16", rule, "use bfloat16, or " + sm.REMEDY)
        if call.bias is not None:
            rule = "it takes no additive bias"
            return Reason("flash", "bias", rule, sm.REMEDY)
        parts = sm.split(call.mask)
        return parts if isinstance(parts, Reason) else None

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Flash:
        """Adjust the block sizes, those of the backward too; interpret on a CPU."""
        dtype = "float32" if config.float32_qk_product else call.dtype
        blocks, changes = adjust(config.flash_block_sizes, replace(call, dtype=dtype), "flash", target, training=True)
        return Flash(call.scale, blocks, target.platform == "cpu", config.float32_qk_product, changes)

    def lines(self, call: Call) -> dict[str, str]:
        """Describe the kernel for `explain`."""
        how = "interpret mode: for tests" if self.interpret else "Pallas"
        changes = "".join(f"; changed {change} ({change.reason})" for change in self.changes)
        return {"runs": f"flash (JAX splash attention, {how})", "blocks": f"{self.blocks}{changes}"}

    def forward(
        self, q: Array, k: Array, v: Array, bias: Bias, mask: Mask, q_offset: Offset, kv_offset: Offset
    ) -> tuple[Array, Array]:
        """Return (out [B,T,N,H], lse [B,N,T])."""
        with _precision(self._compute_dtype(q)):
            problem = self._problem(q, k, v, mask, q_offset, kv_offset)
            out, lse = problem.forward(self.blocks)
        empty = lse < NOTHING_SEEN
        out = jnp.where(empty[..., None], 0, out).astype(q.dtype)
        return problem.checked(out.swapaxes(1, 2)), jnp.where(empty, NEG_INF, lse)

    def backward(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Bias,
        mask: Mask,
        q_offset: Offset,
        kv_offset: Offset,
        out: Array,
        lse: Array,
        dout: Array,
        dlse: Array,
    ) -> tuple[Array, Array, Array, Bias]:
        """Return (dq, dk, dv, None) from a given LSE and output; dk and dv are float32, rounded once to k's dtype."""
        # Rows with nothing to attend to come back with a finite LSE and no gradient: splash never meets -inf.
        finite, delta, dout = row_gradient(out.swapaxes(1, 2), dout.swapaxes(1, 2), lse, dlse)
        with _precision(self._compute_dtype(q)):
            problem = self._problem(q, k, v, mask, q_offset, kv_offset)
            rows = (finite, dout.astype(problem.q.dtype), delta)
            dq, dk, dv = problem.backward(self.blocks, *rows)
        dq = (dq.astype(jnp.float32) * self.scale).astype(q.dtype)
        dk, dv = (x.swapaxes(1, 2).astype(jnp.float32) for x in (dk, dv))
        return problem.checked(dq.swapaxes(1, 2)), dk, dv, None

    def _compute_dtype(self, q: Array) -> Any:
        return jnp.dtype(jnp.float32) if self.float32_qk_product else q.dtype

    def _problem(self, q: Array, k: Array, v: Array, mask: Mask, q_offset: Offset, kv_offset: Offset) -> Problem:
        dtype = self._compute_dtype(q)
        # Splash has no scale, so the queries carry it, multiplied in float32 and rounded once to their dtype. A power
        # of two (head dims 64 and 256) is exact. For others no factor but a power of two is free of that rounding, on
        # q or k: at head dim 128 in bfloat16, with scores of standard deviation 1 and 9, the RMS error of the output is
        # 2.3e-3 and 5.2e-3, where exact scores give 1.7e-3 and 1.6e-3. float32_qk_product gives those.
        scaled = (q.astype(jnp.float32) * self.scale).astype(dtype)
        parts = sm.split(mask)
        assert isinstance(parts, sm.Split), parts  # supports() refused it
        return Problem(
            scaled.swapaxes(1, 2), k.astype(dtype).swapaxes(1, 2), v.astype(dtype).swapaxes(1, 2), parts,
            q_offset, kv_offset, self.interpret,
        )  # fmt: skip


def _precision(dtype: Any) -> Any:
    """Ask for whole float32 products where operands are float32; a TPU would round them to bfloat16."""
    return jax.default_matmul_precision("highest") if dtype == jnp.float32 else nullcontext()
