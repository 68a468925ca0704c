"""Two kernels as one: the forward of the first, the backward of the second.

Every kernel's backward takes a given output and LSE, so that any can follow any: both are those of
the same softmax.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels.base import Bias, Kernel, Offset
from maxattn.masks import Mask


@dataclass(frozen=True)
class Pair:
    """Run the forward of one kernel and the backward of another.

    Args:
        first: computes the forward.
        second: computes the backward.
    """

    first: Kernel
    second: Kernel

    @property
    def name(self) -> str:
        """Name both."""
        return f"{self.first.name}/{self.second.name}"

    def forward(
        self,
        q: Array,
        k: Array,
        v: Array,
        bias: Bias,
        mask: Mask,
        q_offset: Offset,
        kv_offset: Offset,
    ) -> tuple[Array, Array]:
        """Return (out [B,T,N,H], lse [B,N,T])."""
        return self.first.forward(q, k, v, bias, mask, q_offset, kv_offset)

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
        """Return (dq, dk, dv, dbias) from a given LSE and output."""
        return self.second.backward(q, k, v, bias, mask, q_offset, kv_offset, out, lse, dout, dlse)

    def lines(self, call: Call) -> dict[str, str]:
        """Describe both for `explain`."""
        first, second = self.first.lines(call), self.second.lines(call)
        runs = f"forward {first['runs']}, backward {second['runs']}"
        blocks, backward = first["blocks"], second.get("backward", second["blocks"])
        return {"runs": runs, "blocks": blocks} | (
            {"backward": backward} if backward != blocks else {}
        )
