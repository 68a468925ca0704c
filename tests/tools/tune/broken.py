"""A kernel that `auto` may choose and that cannot be compiled: how a compiler's error reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from maxattn.kernels.base import Inputs, Kernel, Lines, Result


class CompilerError(Exception):
    """What no library of Python raises."""


@dataclass(frozen=True)
class Broken(Kernel):
    """Compute a forward, and fail to compile a backward."""

    name: ClassVar[str] = "broken"
    scale: float = 1.0

    @staticmethod
    def build(call: Any, config: Any, target: Any) -> Broken:
        """Take the scale."""
        return Broken(call.scale)

    def forward(self, inputs: Inputs) -> Result:
        """Return the first value for every query: fast, and of no use."""
        out = jnp.broadcast_to(inputs.v[:, :1], inputs.q.shape)
        return Result(out, jnp.zeros(inputs.q.shape[:3], jnp.float32).swapaxes(1, 2))

    def backward(self, inputs: Inputs, rows: Any) -> Any:
        """Fail as a compiler does."""
        raise CompilerError(f"no registers for head dim {inputs.q.shape[-1]}\nand more lines")

    def lines(self, call: Any) -> Lines:
        """Name it."""
        return Lines("broken", "none")


def zeros(*shape: int) -> jax.Array:
    """Make an array, to call attention with."""
    return jnp.zeros(shape)
