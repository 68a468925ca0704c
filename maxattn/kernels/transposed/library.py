"""The kernels of `tpu_flash`: a forward on one batch row, and a backward on all rows at once."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, log2
from typing import Any

from jaxtyping import Array

from maxattn.kernels.splash.calls import Blocks, Library, Operands, Setup, Stats
from maxattn.kernels.transposed.backward import backward
from maxattn.kernels.transposed.forward import forward

LOG2E = log2(e)


@dataclass(frozen=True)
class Transposed(Library):
    """Call the kernels.

    Args:
        interpret: run in Pallas' interpreter.
        v_is_turned: transpose V before the forward, not inside.
    """

    interpret: bool
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
