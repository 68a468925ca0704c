"""FlashAttention-4's backward on Hopper GPUs at head dims that fa4-jax has no settings for.

Its own call needs copies of all arrays, of 192 or 256 channels a head. Here a kernel for so many
takes the arrays as they are (`tile_sizes.kernel_width`), under a window or a test of pairs too.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jaxtyping import Array

from maxattn.kernels.base import Grads, Rows, with_batch_folded
from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.backward_steps import (
    Launches,
    library_has_launches,
    of_sums,
    zeros_of_keys,
)
from maxattn.kernels.fa4.own_array import own_array
from maxattn.kernels.fa4.tile_sizes import kernel_width


def takes(q: Array) -> bool:
    """Tell whether a backward is this one, where maxattn launches the kernels."""
    return kernel_width(q.shape[-1]) != q.shape[-1] and library_has_launches()


def backward(inputs: tuple[Array, ...], rows: Rows, config: Any) -> Grads:
    """Return (dq, dk, dv) from a given output and LSE.

    Args:
        inputs: q, k, v, bfloat16 or float16, and the arrays that a test of pairs reads.
        rows: of the queries.
        config: fa4-jax's, of the scale, the window and the test.
    """
    if len(inputs) > 3:  # the arrays of a test, under no vmap
        return _backward(inputs, rows, config=config)
    return with_batch_folded(partial(_backward, config=config), inputs, rows)


def _backward(inputs: tuple[Array, ...], rows: Rows, *, config: Any) -> Grads:
    q, k, v, out, dout = (own_array(x) for x in (*inputs[:3], rows.out, rows.dout))
    launches = WideLaunches(config.scale, q, k, config)
    delta, lse, dq = launches.first(out, dout, rows.lse)
    dq, dk, dv = launches.whole((q, k, v, dout, lse, delta, dq), inputs[3:])
    return Grads(launches.last(dq, q), dk, dv)


class WideLaunches(Launches):
    """Make the launches over all keys, where query heads share keys too."""

    def whole(self, given: tuple[Array, ...], arrays: tuple[Array, ...]) -> tuple[Array, ...]:
        """Return dQ as sums, and dK and dV.

        Args:
            given: q, k, v, dout, what `first` returns without dQ's zeros, and these.
            arrays: what a test of pairs reads.
        """
        lib, (q, k, v, *_) = library(), given
        if q.shape[2] == k.shape[2]:
            return self._main(lib._fa4_bwd, given, arrays, [k, v])
        zeros = [zeros_of_keys(k, self._keys)] * 2
        dq, dk, dv = self._main(lib._fa4_bwd_gqa, (*given, *zeros), arrays, zeros)
        made, scale = self._made, self._made["scale"]
        of_k = lib._aux_static("post_k", made["post_k"], scale)
        of_v = lib._aux_static("post_v", made["post_v"], None)
        dk, dv = (
            of_sums(lib._fa4_bwd_post_dk, of_k, dk, k),
            of_sums(lib._fa4_bwd_post_dv, of_v, dv, v),
        )
        return dq, dk, dv

    def _main(self, run: Any, given: Any, arrays: Any, like: list[Array]) -> Any:
        lib, sums = library(), len(given) - 4
        of_keys = lib._QKV_SPEC if sums == 3 else lib._F32_SPEC
        return self._call(
            run,
            [self._dq, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like)],
            self._made,
            *given,
            tuple(arrays),
            in_specs=[lib._QKV_SPEC] * 4 + [lib._F32_SPEC] * sums + [None] * len(arrays),
            out_specs=[lib._F32_SPEC, of_keys, of_keys],
            input_output_aliases={6 + n: n for n in range(sums - 2)},
            name=run.__name__.strip("_"),
        )
