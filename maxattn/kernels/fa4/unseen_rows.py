"""Gradients of queries that see nothing, made 0 in place.

A query that sees no key has no gradient, whatever comes back for it, NaN too. To choose 0 for its
rows XLA reads and writes all of dout, a twentieth of the backward over segments of 1,000 tokens.
Here a kernel reads the LSE, and writes over the rows that see nothing: dout itself, where nothing
else reads it, else a copy.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import jax
from jaxtyping import Array, Float

from maxattn.kernels.base import with_batch_folded
from maxattn.kernels.fa4.alignment import library
from maxattn.kernels.fa4.kernel_calls import run_unseen_rows
from maxattn.kernels.fa4.own_array import own_array

LEAST = 2**21  # numbers, from which on a pass over them takes longer than to read the LSE


def pays(dout: Array) -> bool:
    """Tell whether a pass over dout takes longer than a launch."""
    return dout.size >= LEAST


def cleared(dout: Float[Array, "B T N H"], lse: Float[Array, "B N T"]) -> Float[Array, "B T N H"]:
    """Return dout with 0 where the LSE is -inf."""
    return with_batch_folded(_cleared, dout, lse)


def _cleared(dout: Array, lse: Array) -> Array:
    lib, cutejax = library(), import_module("cutejax")
    dout, lse = own_array(dout), own_array(lse)
    return cutejax.call(
        run_unseen_rows,
        jax.ShapeDtypeStruct(dout.shape, dout.dtype),
        _kernel(),
        dout,
        lse,
        in_specs=[lib._QKV_SPEC, lib._LSE_SPEC],
        out_specs=lib._QKV_SPEC,
        input_output_aliases={0: 0},
        name="maxattn_unseen_rows",
    )


@cache
def _kernel() -> Any:
    library()  # imports CuTe
    return import_module("maxattn.kernels.fa4.unseen_rows_kernel").UnseenRows()
