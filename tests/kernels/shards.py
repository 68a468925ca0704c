"""A kernel over shards of queries and keys whose positions are traced, put together as rings do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from maxattn import masks as M
from maxattn.kernels.base import Inputs, Kernel, Rows
from maxattn.kernels.softmax import merge_by_lse


def by_shards(kernel: Kernel, mask: M.Mask, x: dict[str, Any], size: int) -> tuple[jax.Array, ...]:
    """Return out, lse, dq, dk and dv: a merged forward, then a backward of the merge."""
    forward = jax.jit(lambda q, k, v, i, j: kernel.forward(Inputs(q, k, v, None, mask, i, j)))

    @jax.jit
    def backward(q: Any, k: Any, v: Any, i: Any, j: Any, rows: Rows) -> Any:
        return kernel.backward(Inputs(q, k, v, None, mask, i, j), rows)[:3]

    q, k, v, dout, dlse = (jnp.asarray(x[name]) for name in ("q", "k", "v", "dout", "dlse"))
    starts = range(0, q.shape[1], size)
    grads = [jnp.zeros(y.shape, jnp.float32) for y in (q, k, v)]
    outs, lses = [], []
    for i in starts:
        mine = slice(i, i + size)
        parts = [forward(q[:, mine], k[:, j : j + size], v[:, j : j + size], i, j) for j in starts]
        out, lse = merge_by_lse([tuple(part) for part in parts])
        outs, lses = [*outs, out], [*lses, lse]
        rows = Rows(out.astype(q.dtype), lse, dout[:, mine], dlse[:, :, mine])
        for j in starts:
            at = slice(j, j + size)
            found = backward(q[:, mine], k[:, at], v[:, at], i, j, rows)
            for n, (where, grad) in enumerate(zip((mine, at, at), found, strict=True)):
                grads[n] = grads[n].at[:, where].add(grad)
    return jnp.concatenate(outs, 1), jnp.concatenate(lses, 2), *grads
