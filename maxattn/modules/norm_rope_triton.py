"""Norm and rotary embedding of queries or keys in one pass over memory, for NVIDIA GPUs: Triton
kernels through Pallas.

A row is one token's projection, N heads of H channels. Forward: the row and its angles are read, y
is written.

    z = x + bias;   r = 1 / sqrt(mean(z^2) + eps);   n = z * r;   u = n * scale;   y = turn(u)

Backward: dy and x are read, and dx is written. The forward has kept r of a norm across heads; that
of one head costs less to compute again. Sums over tokens stay in registers, one set a program.

    du = turn back(dy);   g = du * scale;   dx = (g - n * mean(g * n)) * r
    dscale = sum of du * n;   dbias = sum of dx

All arithmetic is float32. Triton's arrays have powers of two as sizes, so a row is taken as chunks
of whole heads, and every chunk as two halves (a, b) of channels that are pairs of the rotary
embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn.devices import DEVICES
from maxattn.jax_private.triton import triton_params, triton_split

CHUNK = 1024  # channels
MAX_CHUNKS = 32
# Channels of a thread. More make fewer reductions across threads, fewer spare registers: about so
# many measured best on an H200, for rows of 1,536 and of 5,120; few heads in a chunk leave a thread
# more.
CHANNELS = 12
ROOMY = 24  # up to here registers hold bias, scale and the next row as well
MOST_CHANNELS = 48  # beyond, not even the sums
MULTIPROCESSORS = DEVICES["NVIDIA H200"].sms
Parts = tuple[Array, ...]  # of a chunk as it is loaded: the whole, or a and b
Pair = Parts  # a and b


@dataclass(frozen=True)
class Row:
    """Say what is done to a row.

    Args:
        heads: N.
        head_dim: H, a power of two, at least 16.
        norm: "across" all channels of a token, "head" by head, or None.
        eps: of the norm.
        style: of the rotary embedding, "interleaved" or "half", or None for none.
    """

    heads: int
    head_dim: int
    norm: str | None
    eps: float
    style: str | None

    @property
    def chunk(self) -> int:
        """Return the heads of a chunk, a power of two that divides N."""
        return gcd(self.heads, max(1, CHUNK // self.head_dim))

    @property
    def chunks(self) -> int:
        """Return into how many chunks a row is taken."""
        return self.heads // self.chunk

    @property
    def warps(self) -> int:
        """Return how many warps of 32 threads work on a row."""
        need, most = self.heads * self.head_dim // CHANNELS, self.chunk * self.head_dim // 4
        return max(1, 2 ** ((min(need, most) - 1).bit_length()) // 32)

    @property
    def channels(self) -> float:
        """Return how many channels a thread has."""
        return self.heads * self.head_dim / (32 * self.warps)

    @property
    def programs(self) -> int:
        """Return how many programs the backward has, about what a GPU holds at once: each keeps a
        set of sums.
        """
        held = 16 if self.channels <= CHANNELS else 8  # warps of a multiprocessor
        return -(-MULTIPROCESSORS * held // self.warps)

    def fits(self) -> bool:
        """Say whether the kernels take such a row."""
        power = self.head_dim & (self.head_dim - 1) == 0
        if not power or not 16 <= self.head_dim <= 512 or self.chunks > MAX_CHUNKS:
            return False
        return self.channels <= MOST_CHANNELS


# ---- calls ---------------------------------------------------------------------------------------


def forward(
    row: Row,
    x: Float[Array, "M N H"],
    vectors: dict[str, Array],
    tables: tuple[Array, ...],
    keep: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "M N H"], Float[Array, " M"] | None]:
    """Run the forward kernel.

    Args:
        row: what is done.
        x: the projection's rows.
        vectors: "bias" and "scale" [N, H], or [1, H] for all heads, those that there are.
        tables: cosines and sines [L, H/2] in float32, L dividing M: row m has angle m % L; or none.
        keep: whether to return r of a norm across heads, [M], for the backward.
        interpret: run it as ordinary operations, on any device.
    """
    from jax.experimental import pallas as pl

    tokens = len(x)
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
    row: Row,
    dy: Float[Array, "M N H"],
    x: Float[Array, "M N H"],
    r: Float[Array, " M"] | None,
    vectors: dict[str, Array],
    tables: tuple[Array, ...],
    interpret: bool = False,
) -> tuple[Float[Array, "M N H"], dict[str, Float[Array, "N H"]]]:
    """Run the backward kernel: dx, and the gradients of `vectors` in float32, head by head."""
    from jax.experimental import pallas as pl

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
    row: Row, x_ref: Any, refs: dict[str, Any], tables: Any, y_ref: Any, r_ref: Any
) -> None:
    from jax.experimental import pallas as pl

    token = pl.program_id(0)
    vectors = _load_vectors(row, refs)
    z = _with_bias([_as_float32(raw) for raw in _read_row(row, x_ref, token)], vectors)
    r, angles = _over_root(row, z), _angles(row, tables, token)
    for c in range(row.chunks):
        u = _scaled(_times(z[c], r[c]), vectors, c)
        _store(row, y_ref, token, c, _turn(_pairs(row, u), angles))
    if r_ref is not None:
        r_ref[token] = r[0]


def _backward_kernel(
    row: Row,
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
    held = _vector_pairs(row, refs) if roomy else None

    def read(token: Any) -> Any:
        raw = [_read_row(row, ref, token) for ref in (dy_ref, x_ref)]
        return raw, None if r_ref is None else r_ref[token], _angles(row, tables, token)

    def one(i: Any, carry: Any) -> Any:
        token, (sums, ahead) = first + i * programs, carry
        raw, r, angles = read(token) if ahead is None else ahead
        later = None if ahead is None else read(jnp.minimum(token + programs, tokens - 1))
        dx, more = _pull_back(
            row, raw, r, angles, _vector_pairs(row, refs) if held is None else held
        )
        for c in range(row.chunks):
            _store(row, dx_ref, token, c, dx[c])
        return jax.tree.map(jnp.add, sums, more), later

    zero = jnp.zeros((row.chunk, row.head_dim // 2), jnp.float32)
    carry = {name: [(zero, zero)] * row.chunks for name in refs}, read(first) if roomy else None
    sums, _ = jax.lax.fori_loop(
        0, jax.lax.div(tokens - first + programs - 1, jnp.int32(programs)), one, carry
    )
    for name, each in sums.items():
        for c in range(row.chunks):
            _store(row, sum_refs[name], first, c, each[c])


def _pull_back(
    row: Row, raw: Any, kept: Array | None, angles: Pair | None, vectors: dict[str, list[Pair]]
) -> tuple[list[Pair], dict[str, list[Pair]]]:
    """Return dx of a row, and what it adds to the gradients of the vectors."""
    dy, x = ([_pairs(row, _as_float32(chunk)) for chunk in each] for each in raw)
    back = None if angles is None else (angles[0], -angles[1])
    du = [_turn(each, back) for each in dy]
    z = _with_bias(x, vectors)
    r = _over_root(row, z) if kept is None else [kept] * row.chunks
    g = [_scaled(each, vectors, c) for c, each in enumerate(du)]
    dx = g if row.norm is None else _through_norm(row, g, z, r)
    sums = {
        "bias": dx,
        "scale": [_times(_product(*each), s) for *each, s in zip(du, z, r, strict=True)],
    }
    return dx, {name: sums[name] for name in vectors}


def _through_norm(row: Row, g: list[Pair], z: list[Pair], r: list[Any]) -> list[Pair]:
    # The mean of g * z rather than of g * n: it need not wait for r.
    mean = _mean(row, [_product(*each) for each in zip(g, z, strict=True)])
    slopes = [m * s * s for m, s in zip(mean, r, strict=True)]
    return [
        ((ga - za * m) * s, (gb - zb * m) * s)
        for (ga, gb), (za, zb), m, s in zip(g, z, slopes, r, strict=True)
    ]


# ---- steps ---------------------------------------------------------------------------------------


def _over_root(row: Row, z: list[Parts]) -> list[Any]:
    """Return r, by which the norm multiplies each chunk."""
    if row.norm is None:
        return [1.0] * row.chunks
    return [jax.lax.rsqrt(m + row.eps) for m in _mean(row, [_product(each, each) for each in z])]


def _mean(row: Row, values: list[Parts]) -> list[Array]:
    """Take the mean over a token's channels, or over each head's: one array a chunk, to broadcast
    over it.
    """
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


def _turn(x: Pair, angles: Pair | None) -> Pair:
    if angles is None:
        return x
    (a, b), (cos, sin) = x, angles
    return a * cos - b * sin, a * sin + b * cos


def _angles(row: Row, tables: Any, token: Any) -> Pair | None:
    """Load the cosines and sines of a token: [heads, H/2]."""
    if not tables:
        return None
    # In the shape of a chunk, heads repeated: each thread then loads what it needs, and none
    # exchanges any.
    channel = jax.lax.broadcasted_iota(jnp.int32, (row.chunk, row.head_dim // 2), 1)
    cos, sin = (ref[jax.lax.rem(token, jnp.int32(ref.shape[0])), channel] for ref in tables)
    return cos, sin


def _product(x: Parts, y: Parts) -> Parts:
    return tuple(map(jnp.multiply, x, y))


def _times(x: Parts, factor: Any) -> Parts:
    return tuple(each * factor for each in x)


def _pairs(row: Row, parts: Parts) -> Pair:
    """Return the two halves of a chunk's pairs, twice [heads, H/2]."""
    if row.style != "interleaved":
        return parts[0], parts[1]
    return triton_split(parts[0].reshape(row.chunk, row.head_dim // 2, 2))


# ---- memory --------------------------------------------------------------------------------------


def _read_row(row: Row, ref: Any, token: Any) -> list[Parts]:
    """Load a row as it stands in memory, chunk by chunk."""
    return [
        tuple(ref[token, _heads(row, c), part] for part in _parts(row)) for c in range(row.chunks)
    ]


def _vector_pairs(row: Row, refs: dict[str, Any]) -> dict[str, list[Pair]]:
    return {
        name: [_pairs(row, parts) for parts in each]
        for name, each in _load_vectors(row, refs).items()
    }


def _load_vectors(row: Row, refs: dict[str, Any]) -> dict[str, list[Parts]]:
    """Load bias and scale, those that there are, chunk by chunk."""
    return {
        name: [_load_vector(row, ref, c) for c in range(row.chunks)] for name, ref in refs.items()
    }


def _load_vector(row: Row, ref: Any, c: int) -> Parts:
    if ref.shape[0] == row.heads:
        return _as_float32(tuple(ref[_heads(row, c), part] for part in _parts(row)))
    return _as_float32(tuple(_repeated(row, ref, part) for part in _parts(row)))


def _repeated(row: Row, ref: Any, part: Any) -> Float[Array, "heads H"]:
    """Load what all heads share, in the shape of a chunk."""
    channel = part.start + jax.lax.broadcasted_iota(jnp.int32, (row.chunk, part.size), 1)
    return ref[jnp.zeros_like(channel), channel]


def _as_float32(raw: Parts) -> Parts:
    return tuple(each.astype(jnp.float32) for each in raw)


def _store(row: Row, ref: Any, place: Any, c: int, x: Pair) -> None:
    """Store a chunk of a token's row, or of a program's sums."""
    a, b = (each.astype(ref.dtype) for each in x)
    if row.style == "interleaved":
        ref[place, _heads(row, c), :] = jnp.stack((a, b), axis=-1).reshape(row.chunk, row.head_dim)
        return
    for each, part in zip((a, b), _parts(row), strict=True):
        ref[place, _heads(row, c), part] = each


def _heads(row: Row, c: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(c * row.chunk, row.chunk)


def _parts(row: Row) -> list[Any]:
    """Return which channels of a head are loaded together: all, or those that are first in their
    pairs, and second.
    """
    from jax.experimental import pallas as pl

    half = row.head_dim // 2
    return (
        [pl.ds(0, row.head_dim)]
        if row.style == "interleaved"
        else [pl.ds(0, half), pl.ds(half, half)]
    )
