"""Norm and rotary embedding in one pass over memory: Triton kernels through Pallas.

A row is one token's projection, N heads of H channels. Forward: the row and its angles are read, y
is written.

    z = x + bias;   r = 1 / sqrt(mean(z^2) + eps);   n = z * r;   u = n * scale;   y = rotate(u)

Backward: dy and x are read, and dx is written. The forward has kept r of a norm across heads; that
of one head costs less to compute again. Sums over tokens stay in registers, one set a program.

    du = rotate back(dy);   g = du * scale;   dx = (g - n * mean(g * n)) * r
    dscale = sum of du * n;   dbias = sum of dx

All arithmetic is float32. Triton's arrays have powers of two as sizes, so a row is taken as chunks
of whole heads, and every chunk as two halves (a, b) of channels that are pairs of the rotary
embedding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.jax_private.triton import triton_params
from maxattn.modules.norm_rope.row import NormRopeRow
from maxattn.modules.norm_rope.triton_row import (
    ROOMY,
    Pair,
    Parts,
    TritonRow,
    angles_of,
    as_float32,
    load_vectors,
    pairs,
    read_row,
    store,
    vector_pairs,
)

# ---- calls ---------------------------------------------------------------------------------------


def forward(
    of: NormRopeRow,
    x: Float[Array, "M N H"],
    vectors: dict[str, Array],
    tables: tuple[Array, ...],
    keep: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "M N H"], Float[Array, " M"] | None]:
    """Run the forward kernel.

    Args:
        of: what is done to each row.
        x: the projection's rows.
        vectors: "bias" and "scale" [N, H], or [1, H] for all heads, those that there are.
        tables: cosines and sines [L, H/2] in float32, L dividing M: row m has angle m % L; or none.
        keep: whether to return r of a norm across heads, [M], for the backward.
        interpret: run it as ordinary operations, on any device.
    """
    from jax.experimental import pallas as pl

    row, tokens = TritonRow.of(of), len(x)
    r = jax.ShapeDtypeStruct((tokens,), jnp.float32) if keep and row.norm == "across" else None
    return pl.pallas_call(
        partial(_forward_kernel, row),
        grid=(tokens,),
        interpret=interpret,
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype), r),
        compiler_params=triton_params(row.warps),
        name="norm_rotary",
    )(x, vectors, tables)


def backward(
    of: NormRopeRow,
    dy: Float[Array, "M N H"],
    x: Float[Array, "M N H"],
    r: Float[Array, " M"] | None,
    vectors: dict[str, Array],
    tables: tuple[Array, ...],
    interpret: bool = False,
) -> tuple[Float[Array, "M N H"], dict[str, Float[Array, "N H"]]]:
    """Run the backward kernel: dx, and the gradients of `vectors` in float32, head by head."""
    from jax.experimental import pallas as pl

    row = TritonRow.of(of)
    programs = min(row.programs, len(x))
    sums = jax.ShapeDtypeStruct((programs, row.heads, row.head_dim), jnp.float32)
    dx, sums = pl.pallas_call(
        partial(_backward_kernel, row, programs),
        grid=(programs,),
        interpret=interpret,
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype), dict.fromkeys(vectors, sums)),
        compiler_params=triton_params(row.warps),
        name="norm_rotary_backward",
    )(dy, x, r, vectors, tables)
    return dx, {name: each.sum(0) for name, each in sums.items()}


# ---- kernels -------------------------------------------------------------------------------------


def _forward_kernel(
    row: TritonRow, x_ref: Any, refs: dict[str, Any], tables: Any, y_ref: Any, r_ref: Any
) -> None:
    from jax.experimental import pallas as pl

    token = pl.program_id(0)
    vectors = load_vectors(row, refs)
    z = _with_bias([as_float32(raw) for raw in read_row(row, x_ref, token)], vectors)
    r, angles = _over_root(row, z), angles_of(row, tables, token)
    for c in range(row.chunks):
        u = _scaled(_times(z[c], r[c]), vectors, c)
        store(row, y_ref, token, c, _rotate(pairs(row, u), angles))
    if r_ref is not None:
        r_ref[token] = r[0]


def _backward_kernel(
    row: TritonRow,
    programs: int,
    dy_ref: Any,
    x_ref: Any,
    r_ref: Any,
    refs: dict[str, Any],
    tables: Any,
    dx_ref: Any,
    sum_refs: dict[str, Any],
) -> None:
    from jax.experimental import pallas as pl

    first, tokens, roomy = pl.program_id(0), x_ref.shape[0], row.channels <= ROOMY
    held = vector_pairs(row, refs) if roomy else None

    def read(token: Any) -> Any:
        raw = [read_row(row, ref, token) for ref in (dy_ref, x_ref)]
        return raw, None if r_ref is None else r_ref[token], angles_of(row, tables, token)

    def one(i: Any, carry: Any) -> Any:
        token, (sums, ahead) = first + i * programs, carry
        raw, r, angles = read(token) if ahead is None else ahead
        later = None if ahead is None else read(jnp.minimum(token + programs, tokens - 1))
        vectors = vector_pairs(row, refs) if held is None else held
        dx, more = _pull_back(row, raw, r, angles, vectors)
        for c in range(row.chunks):
            store(row, dx_ref, token, c, dx[c])
        return jax.tree.map(jnp.add, sums, more), later

    zero = jnp.zeros((row.chunk, row.head_dim // 2), jnp.float32)
    carry = {name: [(zero, zero)] * row.chunks for name in refs}, read(first) if roomy else None
    rounds = jax.lax.div(tokens - first + programs - 1, jnp.int32(programs))
    sums, _ = jax.lax.fori_loop(0, rounds, one, carry)
    for name, each in sums.items():
        for c in range(row.chunks):
            store(row, sum_refs[name], first, c, each[c])


def _pull_back(
    row: TritonRow,
    raw: Any,
    kept: Array | None,
    angles: Pair | None,
    vectors: dict[str, list[Pair]],
) -> tuple[list[Pair], dict[str, list[Pair]]]:
    """Return dx of a row, and what it adds to the gradients of the vectors."""
    dy, x = ([pairs(row, as_float32(chunk)) for chunk in each] for each in raw)
    back = None if angles is None else (angles[0], -angles[1])
    du = [_rotate(each, back) for each in dy]
    z = _with_bias(x, vectors)
    r = _over_root(row, z) if kept is None else [kept] * row.chunks
    g = [_scaled(each, vectors, c) for c, each in enumerate(du)]
    dx = g if row.norm is None else _through_norm(row, g, z, r)
    sums = {
        "bias": dx,
        "scale": [_times(_product(*each), s) for *each, s in zip(du, z, r, strict=True)],
    }
    return dx, {name: sums[name] for name in vectors}


def _through_norm(row: TritonRow, g: list[Pair], z: list[Pair], r: list[Any]) -> list[Pair]:
    # The mean of g * z rather than of g * n: it need not wait for r.
    mean = _mean(row, [_product(*each) for each in zip(g, z, strict=True)])
    slopes = [m * s * s for m, s in zip(mean, r, strict=True)]
    return [
        ((ga - za * m) * s, (gb - zb * m) * s)
        for (ga, gb), (za, zb), m, s in zip(g, z, slopes, r, strict=True)
    ]


# ---- steps ---------------------------------------------------------------------------------------


def _over_root(row: TritonRow, z: list[Parts]) -> list[Any]:
    """Return r, by which the norm multiplies each chunk."""
    if row.norm is None:
        return [1.0] * row.chunks
    return [jax.lax.rsqrt(m + row.eps) for m in _mean(row, [_product(each, each) for each in z])]


def _mean(row: TritonRow, values: list[Parts]) -> list[Array]:
    """Take the mean over a token's channels, or over each head's: one array a chunk."""
    sums = [sum(parts[1:], parts[0]) for parts in values]
    if row.norm == "head":
        return [jnp.sum(each, axis=1, keepdims=True) / row.head_dim for each in sums]
    total = jnp.sum(sum(sums[1:], sums[0]))
    return [total / (row.heads * row.head_dim)] * row.chunks


def _with_bias(x: list[Parts], vectors: dict[str, list[Parts]]) -> list[Parts]:
    if "bias" not in vectors:
        return x
    return [tuple(map(jnp.add, *each)) for each in zip(x, vectors["bias"], strict=True)]


def _scaled(x: Parts, vectors: dict[str, list[Parts]], c: int) -> Parts:
    return _product(x, vectors["scale"][c]) if "scale" in vectors else x


def _rotate(x: Pair, angles: Pair | None) -> Pair:
    if angles is None:
        return x
    (a, b), (cos, sin) = x, angles
    return a * cos - b * sin, a * sin + b * cos


def _product(x: Parts, y: Parts) -> Parts:
    return tuple(map(jnp.multiply, x, y))


def _times(x: Parts, factor: Any) -> Parts:
    return tuple(each * factor for each in x)
