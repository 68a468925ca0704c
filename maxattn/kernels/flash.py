"""JAX's splash attention (Pallas, for TPU): tiles in VMEM, empty tiles skipped, O(T) memory both
ways.

On an NVIDIA GPU the same name is FlashAttention-4 (`flash_gpu.py`).

Source: jax.experimental.pallas.ops.tpu.splash_attention; Dao et al., FlashAttention-2 (arXiv
2307.08691).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.config import AttentionConfig
from maxattn.jax_private import splash as jax_splash
from maxattn.kernels import flash_gpu
from maxattn.kernels.base import Kernel, Lines
from maxattn.kernels.splash import kernel as splash_kernel
from maxattn.kernels.splash import mask_info
from maxattn.kernels.splash.calls import Blocks, Ids, Library, Rows, Setup
from maxattn.target import Target


@dataclass(frozen=True)
class Flash(splash_kernel.Splash):
    """Compute attention with JAX's splash; the backward in one kernel ("fused") or in two."""

    name: ClassVar[str] = "flash"

    @staticmethod
    def supports(call: Call, target: Target) -> Reason | None:
        """Refuse a bias, tables of pairs, arrays under | or ~, and float16 on a TPU; a GPU has its
        own.
        """
        return (
            flash_gpu.supports(call, target)
            if target.platform == "gpu"
            else splash_kernel.refusal("flash", call, target)
        )

    @staticmethod
    def repeats(call: Call, target: Target) -> Reason | None:
        """Say for the kernel of the platform whether its backward repeats."""
        return (
            flash_gpu.repeats(call, target)
            if target.platform == "gpu"
            else splash_kernel.Splash.repeats(call, target)
        )

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> Kernel:
        """Adjust the block sizes, for training and for inference; interpret on a CPU."""
        return (
            flash_gpu.build(call, config, target)
            if target.platform == "gpu"
            else Flash.of(call, config, target)
        )

    def lines(self, call: Call) -> Lines:
        """Describe the kernel for `explain`."""
        return Lines(f"flash (JAX splash attention, {self.how})", self.block_lines())

    @property
    def library(self) -> Library:
        """JAX's kernels."""
        return JaxSplash(self.interpret)


@dataclass(frozen=True)
class JaxSplash:
    """Call the kernels of JAX's splash attention on one batch row."""

    interpret: bool

    def query_factor(self, dtype: Any) -> float:
        """Take the queries as they are."""
        return 1.0

    def forward(
        self, q: Array, k: Array, v: Array, ids: Ids, setup: Setup, blocks: Blocks
    ) -> tuple[Array, Array]:
        """Return (out [N, T, H], lse [N, T])."""
        info = mask_info.mask_info(setup.kinds, setup.codes, setup.padded[0])
        return jax_splash.forward(q, k, v, _ids(ids), info, setup.code, blocks, self.interpret)

    def dkv(
        self,
        q: Array,
        k: Array,
        v: Array,
        ids: Ids,
        rows: Rows,
        setup: Setup,
        blocks: Blocks,
        fused: bool,
    ) -> tuple[Array | None, Array, Array]:
        """Return (dq when fused else None, dk, dv)."""
        # The fused kernel writes a part of dq at every step, so its grid keeps the steps that
        # compute nothing.
        info = mask_info.mask_info(
            setup.kinds, setup.codes, setup.padded[0], by_key=True, shrink=not fused
        )
        return jax_splash.dkv(
            q, k, v, _ids(ids), rows, info, setup.code, blocks, fused, self.interpret
        )

    def dq(
        self, q: Array, k: Array, v: Array, ids: Ids, rows: Rows, setup: Setup, blocks: Blocks
    ) -> Array:
        """Return dq."""
        info = mask_info.mask_info(setup.kinds, setup.codes, setup.padded[0])
        return jax_splash.dq(q, k, v, _ids(ids), rows, info, setup.code, blocks, self.interpret)


def _ids(ids: Ids) -> Any:
    return None if ids is None else jax_splash.segment_ids(*ids)
