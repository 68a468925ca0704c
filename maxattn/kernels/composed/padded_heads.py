"""Compute keys and values of different head dims in a kernel that takes one head dim.

The narrower heads are padded with zeros. Zero columns of Q and K add nothing to a score. Zero
columns of V give zero columns of the output, which are cut off. So the result is exact.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
from jaxtyping import Array

from maxattn.call import Call, Reason
from maxattn.kernels.base import Grads, Inputs, Lines, Result, Rows
from maxattn.kernels.composed.adapted import AdaptedKernel
from maxattn.kernels.kv_block import WHOLE, DqAccumulator, KeyRange, Packed, widened


@dataclass(frozen=True)
class PaddedHeads(AdaptedKernel):
    """Run a kernel over heads padded to the larger of two head dims.

    Args:
        inner: the kernel that computes.
        key_dim: H, the head dim of queries and keys.
        value_dim: V, the head dim of values and output.
    """

    takes_value_dim: ClassVar[bool] = True
    key_dim: int
    value_dim: int

    def computed(self, call: Call) -> Call:
        return with_one_head_dim(call)

    def forward(self, inputs: Inputs) -> Result:
        out, lse = self.inner.forward(self._inputs(inputs))
        return Result(out[..., : self.value_dim], lse)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        dq, dk, dv, dbias = self.inner.backward(self._inputs(inputs), self._rows(rows))
        h, v = self.key_dim, self.value_dim
        return Grads(dq[..., :h], dk[..., :h], dv[..., :v], dbias)

    def accumulator(self, inputs: Inputs, rows: Rows) -> DqAccumulator:
        inner = self.inner.accumulator(self._inputs(inputs), self._rows(rows))
        return _NarrowDq(inner, self.key_dim)

    def accumulator_line(self, inputs: Inputs) -> str:
        return self.inner.accumulator_line(jax.eval_shape(self._inputs, inputs))  # shapes alone

    def lines(self, call: Call) -> Lines:
        lines = self.inner.lines(self.computed(call))
        return lines._replace(runs=f"{lines.runs}, {padding_text(call)}")

    def _inputs(self, inputs: Inputs) -> Inputs:
        q, k, v = map(self._padded, (inputs.q, inputs.k, inputs.v))
        return inputs.replace(q=q, k=k, v=v)

    def _rows(self, rows: Rows) -> Rows:
        return Rows(self._padded(rows.out), rows.lse, self._padded(rows.dout), rows.dlse)

    def _padded(self, x: Array) -> Array:
        return widened(x, max(self.key_dim, self.value_dim))


class _NarrowDq(DqAccumulator):
    """Sum dQ over padded heads, and cut the sum to the head dim of the queries."""

    def __init__(self, inner: DqAccumulator, head_dim: int) -> None:
        self._inner, self._head_dim = inner, head_dim
        self.state: Any = inner.state

    def add(self, keys: Packed, key_range: KeyRange = WHOLE, grads: Packed | None = None) -> Packed:
        self._inner.state = self.state
        found = self._inner.add(keys, key_range, grads)
        self.state = self._inner.state
        return found

    def dq(self) -> Array:
        self._inner.state = self.state
        return self._inner.dq()[..., : self._head_dim]


def with_one_head_dim(call: Call) -> Call:
    """Return a call with all heads padded to the larger of its two head dims."""
    return call.derived(head_dim=max(call.head_dim, call.value_dim), value_head_dim=0)


def padding_text(call: Call) -> str:
    """Return text such as "values of 64 padded to 128"."""
    h, v = call.head_dim, call.value_dim
    return f"values of {v} padded to {h}" if v < h else f"queries and keys of {h} padded to {v}"


def padded_reason(reason: Reason, call: Call) -> Reason:
    """Append the text of the padding to a kernel's refusal of a head dim."""
    if "head dim" not in reason.feature:
        return reason
    return replace(reason, rule=f"{reason.rule} ({padding_text(call)})")
