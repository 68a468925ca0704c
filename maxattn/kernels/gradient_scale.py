"""Keep the backward of float16 operands in the range of float16.

Kernels round dS = P * (dP - D) to the operands' dtype before its products with K and Q. float16
ends at 65,504, and has fewer digits below 2**-14. A backward is linear in dout and dlse, so for
float16 both are multiplied by a power of two per batch row, and the gradients are divided by it.
Since P <= 1, with the norm |.| of a head,

    |dS| <= 2 max|dout| max|v| + max|dlse|

Kernels round products of dS with an entry of q or k too, and sums of such products. The power of
two is above 1 only if the largest possible sum fits. It is below 1 only if a product might not fit;
a gradient that fits in float16 then fits too. A factor below 1 is shared by dout and v (with out),
so that the larger of them gets most of it: dV is a sum of dout, and keeps its digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from maxattn.call import Call
from maxattn.kernels.base import Grads, Inputs, Rows
from maxattn.kernels.softmax import NEG_INF, cleared

LIMIT = 14  # log2 of the largest value: float16 ends at 2**16, and rounded weights can exceed 1
# The largest log2 of a factor. A gradient that is no zero in float16 is a sum over keys of dS that
# are up to 2**10 times as small. Second derivatives lose as many bits at their lower end.
MOST = 10


def backward_in_range(
    backward: Callable[[Inputs, Rows], Grads],
    inputs: Inputs,
    rows: Rows,
    call: Call,
    axes: tuple[str, ...],
) -> Grads:
    """Return the gradients of `backward`, which is given scaled rows if operands are float16.

    Args:
        backward: computes the gradients on one device's shards.
        inputs, rows: the operands on this device.
        call: the global call.
        axes: the mesh axes that split the tokens of a batch row.
    """
    if inputs.q.dtype != jnp.float16:
        return backward(inputs, rows)
    dlse = jnp.where(rows.lse == NEG_INF, 0, rows.dlse)
    rows = replace(rows, dout=cleared(rows.dout, rows.lse), dlse=dlse)
    exponent, lead = _exponent(inputs, rows, call, axes)
    if inputs.bias is not None and inputs.bias.shape[0] == 1:
        exponent = exponent.min(keepdims=True)  # dbias is summed over batch rows

    def times(x: Array, exponent: Array) -> Array:
        factor = jnp.ldexp(jnp.float32(1), exponent).reshape(-1, *(1,) * (x.ndim - 1))
        return (x.astype(jnp.float32) * factor).astype(x.dtype)

    of_v = jnp.clip((exponent + lead) // 2, jnp.minimum(exponent, 0), 0)
    out, dout = times(rows.out, of_v), times(rows.dout, exponent - of_v)
    rows = replace(rows, out=out, dout=dout, dlse=times(rows.dlse, exponent))
    grads = backward(replace(inputs, v=times(inputs.v, of_v)), rows)
    dv = times(grads.dv, of_v - exponent)
    return jax.tree.map(lambda x: times(x, -exponent), grads._replace(dv=None))._replace(dv=dv)


def _exponent(
    inputs: Inputs, rows: Rows, call: Call, axes: tuple[str, ...]
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Return log2 of each batch row's factor (0 for cotangents of 0 or inf), and of dout / v."""

    def largest(x: Array) -> Array:
        return jnp.abs(x).astype(jnp.float32).max(axis=tuple(range(1, x.ndim)), initial=0)

    def norm(x: Array) -> Array:
        return largest(jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(axis=-1)))

    given = inputs.q, inputs.k, inputs.v, rows.dout, rows.dlse
    q, k, v, dout, dlse = jax.lax.stop_gradient(given)
    bounds = jnp.stack([largest(q), largest(k), norm(v), largest(dout), norm(dout), largest(dlse)])
    if axes:
        bounds = jax.lax.pmax(bounds, axes)
    q, k, v, dout, dout_norm, dlse = bounds
    factors = jnp.maximum(jnp.maximum(q, k), 1) * max(1.0, call.scale)
    product = (2 * dout_norm * v + dlse) * factors
    count = call.q_len * call.heads * (call.batch if call.bias else 1)
    whole = jnp.maximum(product, dout) * count
    single, summed = (LIMIT - jnp.frexp(x)[1] for x in (product, whole))
    exponent = jnp.minimum(single, summed.clip(0, MOST))
    lead = jnp.frexp(dout_norm)[1] - jnp.frexp(v)[1]
    return jnp.where(jnp.isfinite(whole) & (whole > 0), exponent, 0), lead
