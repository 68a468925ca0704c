"""The kernels of `tpu_flash` on one batch row: a forward of its own, and JAX splash's backward."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array

from maxattn.kernels.splash.calls import Blocks, Operands, Setup
from maxattn.kernels.splash.jax_splash import JaxSplash
from maxattn.kernels.transposed.forward import forward


@dataclass(frozen=True)
class TransposedForward(JaxSplash):
    """Call the kernels; the forward's queries are multiplied by log2(e), the backward's are not.

    Args:
        v_is_turned: transpose V before the forward, not inside.
    """

    v_is_turned: bool = False

    def forward(self, row: Operands, setup: Setup, blocks: Blocks) -> tuple[Array, Array]:
        """Return (out [N, T, H], lse [N, T])."""
        return forward(row, setup, blocks, self.interpret, self.v_is_turned)
