"""Compute equal blocks of a sequence, each of which attends only to itself, as batch rows.

Packed sequences of one length, or frames that attend to themselves, are a batch of shorter calls:
the arrays are reshaped to [B * blocks, T / blocks, N, H]. No pair between blocks is computed, and
the kernel gets the mask inside a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from jaxtyping import Array

from maxattn.call import Call
from maxattn.kernels.base import Grads, Inputs, Lines, Result, Rows
from maxattn.kernels.composed.adapted import AdaptedKernel
from maxattn.masks import Mask
from maxattn.masks.terms import OwnBlocks, own_blocks

MOST_ROWS = 2**16 - 1  # CUDA's limit of thread blocks along a grid's batch axis


@dataclass(frozen=True)
class BatchRows(AdaptedKernel):
    """Run a kernel over blocks as batch rows.

    Args:
        inner: the kernel that computes.
        count: number of blocks in a sequence.
        mask: the mask inside a block.
    """

    count: int
    mask: Mask

    def computed(self, call: Call) -> Call:
        q_len, kv_len = call.q_len // self.count, call.kv_len // self.count
        batch = call.batch * self.count
        return call.derived(batch=batch, q_len=q_len, kv_len=kv_len, mask=self.mask)

    def forward(self, inputs: Inputs) -> Result:
        out, lse = self.inner.forward(self._inputs(inputs))
        return Result(self._joined(out), self._joined(lse.swapaxes(1, 2)).swapaxes(1, 2))

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        lse, dlse = (self._divided(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (rows.lse, rows.dlse))
        of_blocks = Rows(self._divided(rows.out), lse, self._divided(rows.dout), dlse)
        dq, dk, dv, _ = self.inner.backward(self._inputs(inputs), of_blocks)
        return Grads(*map(self._joined, (dq, dk, dv)))

    def lines(self, call: Call) -> Lines:
        computed = self.computed(call)
        lines = self.inner.lines(computed)
        return lines._replace(runs=f"{lines.runs}, {rows_text(call, computed)}")

    def _inputs(self, inputs: Inputs) -> Inputs:
        q, k, v = map(self._divided, (inputs.q, inputs.k, inputs.v))
        return inputs.replace(q=q, k=k, v=v, mask=self.mask, q_offset=0, kv_offset=0)

    def _divided(self, x: Array) -> Array:
        """Cut [B, T, ...] into blocks: [B * blocks, T / blocks, ...]."""
        b, t, *rest = x.shape
        return x.reshape(b * self.count, t // self.count, *rest)

    def _joined(self, x: Array) -> Array:
        b, t, *rest = x.shape
        return x.reshape(b // self.count, t * self.count, *rest)


def as_batch_rows(call: Call, pays: Callable[[int], bool] | None = None) -> Call:
    """Return the call with its blocks as batch rows.

    The call is returned unchanged if it has a bias, if its tokens' positions are unknown (sharded),
    or if its mask has no equal blocks that attend only to themselves, or too many.

    Args:
        call: the call that one device computes.
        pays: checks whether blocks of a number of tokens are faster as batch rows; None: always.

    >>> from maxattn import masks
    >>> as_batch_rows(Call(2, 32, 32, 4, 4, 64, mask=masks.BlockSlidingWindow(8, 1, 0))).shape_text
    'B=8 T=S=8 N=4 H=64 f32'
    """
    if call.mask.is_full or call.bias is not None or call.sharded:
        return call
    found = own_blocks(call.mask, call.q_len, call.kv_len)
    if found is None or call.batch * found.count > MOST_ROWS:
        return call
    if pays is not None and not pays(max(found.q_len, found.kv_len)):
        return call
    return _divided(call, found)


@lru_cache(maxsize=4096)
def _divided(call: Call, rows: OwnBlocks) -> Call:
    count, q_len, kv_len, mask = rows
    return call.derived(batch=call.batch * count, q_len=q_len, kv_len=kv_len, mask=mask)


def rows_text(call: Call, computed: Call) -> str:
    """Return text with the number and the length of the blocks that became batch rows."""
    q, kv = computed.q_len, computed.kv_len
    tokens = f"{q} tokens" if q == kv else f"{q} queries and {kv} keys"
    return f"{computed.batch // call.batch} blocks of {tokens} as rows of the batch"
