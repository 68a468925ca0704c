"""Norm and rotary embedding of queries or keys in one pass over memory, for NVIDIA GPUs: Triton kernels through Pallas.

A row is one token's projection, N heads of H channels. Forward: the row and its angles are read, y is written.

    z = x + bias;   n = z / sqrt(mean(z^2) + eps);   u = n * scale;   y = turn(u)

Backward: dy and x are read, dx is written; sums over tokens stay in registers, one set a program.

    du = turn back(dy);   g = du * scale;   dx = (g - n * mean(g * n)) / sqrt(mean(z^2) + eps)
    dscale = sum of du * n;   dbias = sum of dx

All arithmetic is float32. Triton's arrays have powers of two as sizes, so a row is taken as chunks of whole heads, and
every chunk as two halves (a, b) of channels that are pairs of the rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxattn import _compat

CHUNK = 1024  # channels
MAX_CHUNKS = 32
MOST_CHANNELS = 48  # of a thread; few heads in a chunk leave more than its registers hold
Pair = tuple[Array, Array]


@dataclass(frozen=True)
class Launch:
    """Say how the kernels run.

    Args:
        forward, backward: channels of a thread at most: more of them make fewer reductions across threads, fewer of
            them spare registers.
        warps: of the whole backward, about all that a GPU holds at once; each program of them keeps one set of sums.
        ahead: whether the backward reads the next row while it works on one.
    """

    forward: int
    backward: int
    warps: int
    ahead: bool


# Measured on an H200: rows of 1,536 channels, and of 5,120.
NARROW, WIDE, WIDE_FROM = Launch(12, 12, 132 * 16, True), Launch(48, 40, 132 * 8, False), 3072


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
    def launch(self) -> Launch:
        """Return how the kernels run on such rows."""
        return WIDE if self.heads * self.head_dim >= WIDE_FROM else NARROW

    def fits(self) -> bool:
        """Say whether the kernels take such a row."""
        power = self.head_dim & (self.head_dim - 1) == 0
        if not power or not 16 <= self.head_dim <= 512 or self.chunks > MAX_CHUNKS:
            return False
        return self.heads * self.head_dim <= MOST_CHANNELS * 32 * self.warps(self.launch.backward)

    def warps(self, channels: int) -> int:
        """Return how many warps give a thread at most about `channels` channels."""
        need, most = self.heads * self.head_dim // channels, self.chunk * self.head_dim // 4
        return max(1, 2 ** ((min(need, most) - 1).bit_length()) // 32)


# ---- calls -----------------------------------------------------------------------------------------------------------


def forward(
    row: Row, x: Float[Array, "M N H"], vectors: dict[str, Array], tables: tuple[Array, ...], interpret: bool = False
) -> Float[Array, "M N H"]:
    """Run the forward kernel.

    Args:
        row: what is done.
        x: the projection's rows.
        vectors: "bias" and "scale" [N, H] in float32, those that there are.
        tables: cosines and sines [L, H/2] in float32, L dividing M: row m has angle m % L; or none.
        interpret: run it as ordinary operations, on any device.
    """
    from jax.experimental import pallas as pl

    kernel = partial(_forward_kernel, row, tuple(vectors))
    return pl.pallas_call(
        kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(x.shape[0],), interpret=interpret,
        compiler_params=_compat.triton_params(row.warps(row.launch.forward)), name="norm_rotary",
    )(x, *_as_pairs(row, vectors), *tables)  # fmt: skip


def backward(
    row: Row, dy: Float[Array, "M N H"], x: Float[Array, "M N H"], vectors: dict[str, Array],
    tables: tuple[Array, ...], interpret: bool = False,
) -> tuple[Float[Array, "M N H"], dict[str, Float[Array, "N H"]]]:  # fmt: skip
    """Run the backward kernel: dx, and the gradients of `vectors`."""
    from jax.experimental import pallas as pl

    warps = row.warps(row.launch.backward)
    programs = min(-(-row.launch.warps // warps), x.shape[0])
    sums = jax.ShapeDtypeStruct((programs * len(vectors) * 2, row.heads, row.head_dim // 2), jnp.float32)
    out = pl.pallas_call(
        partial(_backward_kernel, row, (x.shape[0], programs), tuple(vectors)), grid=(programs,), interpret=interpret,
        out_shape=(jax.ShapeDtypeStruct(x.shape, x.dtype), sums)[: 1 + bool(vectors)],
        compiler_params=_compat.triton_params(warps), name="norm_rotary_backward",
    )(dy, x, *_as_pairs(row, vectors), *tables)  # fmt: skip
    totals = out[1].reshape(programs, len(vectors), 2, row.heads, -1).sum(0) if vectors else ()
    return out[0], {name: _of_pairs(row, total) for name, total in zip(vectors, totals, strict=True)}


def _as_pairs(row: Row, vectors: dict[str, Array]) -> list[Float[Array, "2V N H/2"]]:
    """Put the channels that are first in their pairs before those that are second, all vectors in one array."""
    if not vectors:
        return []
    stacked = jnp.stack(list(vectors.values()))
    if row.style == "interleaved":
        pairs = jnp.moveaxis(stacked.reshape(-1, row.heads, row.head_dim // 2, 2), 3, 1)
    else:
        pairs = jnp.moveaxis(stacked.reshape(-1, row.heads, 2, row.head_dim // 2), 2, 1)
    return [pairs.reshape(-1, row.heads, row.head_dim // 2)]


def _of_pairs(row: Row, pairs: Float[Array, "2 N H/2"]) -> Float[Array, "N H"]:
    axis = 2 if row.style == "interleaved" else 1
    return jnp.moveaxis(pairs, 0, axis).reshape(row.heads, row.head_dim)


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _forward_kernel(row: Row, names: tuple[str, ...], x_ref: Any, *refs: Any) -> None:
    from jax.experimental import pallas as pl

    *held, y_ref = refs
    vectors, tables = _vectors(names, held)
    token = pl.program_id(0)
    z, r = _normed(row, _with_bias(row, _load_row(row, x_ref, token), vectors))
    angles = _angles(row, tables, token)
    for c in range(row.chunks):
        u = _scaled(row, _times(z[c], r[c]), vectors, c)
        _store(row, y_ref, token, c, _turn(u, angles))


def _backward_kernel(
    row: Row, counts: tuple[int, int], names: tuple[str, ...], dy_ref: Any, x_ref: Any, *refs: Any
) -> None:
    from jax.experimental import pallas as pl

    held, outs = refs[: len(refs) - 1 - bool(names)], refs[len(refs) - 1 - bool(names) :]
    vectors, tables = _vectors(names, held)
    first, (tokens, step), ahead = pl.program_id(0), counts, row.launch.ahead

    def read(token: Any) -> Any:
        return _read_row(row, dy_ref, token), _read_row(row, x_ref, token), _angles(row, tables, token)

    def one(i: Any, carry: Any) -> Any:
        token = first + i * step
        sums, now = carry if ahead else (carry, read(token))
        later = read(jnp.minimum(token + step, tokens - 1)) if ahead else None
        *raw, angles = now
        dy, x = ([_as_float32(row, chunk) for chunk in each] for each in raw)
        dx, more = _pull_back(row, dy, x, angles, vectors)
        for c in range(row.chunks):
            _store(row, outs[0], token, c, dx[c])
        sums = jax.tree.map(jnp.add, sums, more)
        return (sums, later) if ahead else sums

    zero = jnp.zeros((row.chunk, row.head_dim // 2), jnp.float32)
    zeros = {name: [(zero, zero)] * row.chunks for name in names}
    carry = (zeros, read(first)) if ahead else zeros
    carry = jax.lax.fori_loop(0, jax.lax.div(tokens - first + step - 1, jnp.int32(step)), one, carry)
    sums = carry[0] if ahead else carry
    for i, name in enumerate(names):
        for c in range(row.chunks):
            _store_sums(row, outs[1], 2 * (first * len(names) + i), c, sums[name][c])


def _vectors(names: tuple[str, ...], held: Any) -> tuple[dict[str, Any], Any]:
    """Find the array of the vectors, each by its place in it, and the tables among a kernel's inputs."""
    return {name: (held[0], 2 * i) for i, name in enumerate(names)}, held[bool(names) :]


def _pull_back(
    row: Row, dy: list[Pair], x: list[Pair], angles: Pair | None, vectors: dict[str, Any]
) -> tuple[list[Pair], dict[str, list[Pair]]]:
    """Return dx of a row, and what it adds to the gradients of the vectors."""
    back = None if angles is None else (angles[0], -angles[1])
    du = [_turn(each, back) for each in dy]
    z, r = _normed(row, _with_bias(row, x, vectors))
    g = [_scaled(row, each, vectors, c) for c, each in enumerate(du)]
    dx = g if row.norm is None else _through_norm(row, g, z, r)
    sums = {"bias": dx, "scale": [_times(_product(*each), s) for *each, s in zip(du, z, r, strict=True)]}
    return dx, {name: sums[name] for name in vectors}


def _through_norm(row: Row, g: list[Pair], z: list[Pair], r: list[Any]) -> list[Pair]:
    # The mean of g * z rather than of g * n: it need not wait for r.
    mean = _mean(row, [_product(*each) for each in zip(g, z, strict=True)])
    slopes = [m * s * s for m, s in zip(mean, r, strict=True)]
    return [((ga - za * m) * s, (gb - zb * m) * s) for (ga, gb), (za, zb), m, s in zip(g, z, slopes, r, strict=True)]


# ---- steps -----------------------------------------------------------------------------------------------------------


def _normed(row: Row, z: list[Pair]) -> tuple[list[Pair], list[Any]]:
    """Return z, and what each chunk of it is multiplied by."""
    if row.norm is None:
        return z, [1.0] * row.chunks
    return z, [jax.lax.rsqrt(m + row.eps) for m in _mean(row, [_product(each, each) for each in z])]


def _mean(row: Row, values: list[Pair]) -> list[Array]:
    """Take the mean over a token's channels, or over each head's: one array a chunk, to broadcast over it."""
    if row.norm == "head":
        return [jnp.sum(a + b, axis=1, keepdims=True) / row.head_dim for a, b in values]
    sums = [a + b for a, b in values]
    total = jnp.sum(sum(sums[1:], sums[0]))
    return [total / (row.heads * row.head_dim)] * row.chunks


def _with_bias(row: Row, x: list[Pair], vectors: dict[str, Any]) -> list[Pair]:
    if "bias" not in vectors:
        return x
    biases = (_load_vector(row, vectors["bias"], c) for c in range(row.chunks))
    return [(xa + a, xb + b) for (xa, xb), (a, b) in zip(x, biases, strict=True)]


def _scaled(row: Row, x: Pair, vectors: dict[str, Any], c: int) -> Pair:
    if "scale" not in vectors:
        return x
    return _product(x, _load_vector(row, vectors["scale"], c))


def _turn(x: Pair, angles: Pair | None) -> Pair:
    if angles is None:
        return x
    (a, b), (cos, sin) = x, angles
    return a * cos - b * sin, a * sin + b * cos


def _angles(row: Row, tables: Any, token: Any) -> Pair | None:
    """Load the cosines and sines of a token: [heads, H/2]."""
    if not tables:
        return None
    # In the shape of a chunk, heads repeated: each thread then loads what it needs, and none exchanges any.
    channel = jax.lax.broadcasted_iota(jnp.int32, (row.chunk, row.head_dim // 2), 1)
    cos, sin = (ref[jax.lax.rem(token, jnp.int32(ref.shape[0])), channel] for ref in tables)
    return cos, sin


def _product(x: Pair, y: Pair) -> Pair:
    return x[0] * y[0], x[1] * y[1]


def _times(x: Pair, factor: Any) -> Pair:
    return x[0] * factor, x[1] * factor


# ---- memory ----------------------------------------------------------------------------------------------------------


def _load_row(row: Row, ref: Any, token: Any) -> list[Pair]:
    return [_as_float32(row, raw) for raw in _read_row(row, ref, token)]


def _read_row(row: Row, ref: Any, token: Any) -> list[list[Array]]:
    """Load a row as it stands in memory, chunk by chunk: whole chunks, or the two halves of each head."""
    parts = [slice(None)] if row.style == "interleaved" else _halves(row)
    return [[ref[token, _heads(row, c), part] for part in parts] for c in range(row.chunks)]


def _as_float32(row: Row, raw: list[Array]) -> Pair:
    """Return the halves of a chunk's pairs in float32: twice [heads, H/2]."""
    wide = [each.astype(jnp.float32) for each in raw]
    if row.style != "interleaved":
        return wide[0], wide[1]
    return _compat.triton_split(wide[0].reshape(row.chunk, row.head_dim // 2, 2))


def _store(row: Row, ref: Any, token: Any, c: int, x: Pair) -> None:
    a, b = (each.astype(ref.dtype) for each in x)
    if row.style == "interleaved":
        ref[token, _heads(row, c), :] = jnp.stack((a, b), axis=-1).reshape(row.chunk, row.head_dim)
        return
    for each, part in zip((a, b), _halves(row), strict=True):
        ref[token, _heads(row, c), part] = each


def _load_vector(row: Row, vector: tuple[Any, int], c: int) -> Pair:
    ref, place = vector
    return ref[place, _heads(row, c), :], ref[place + 1, _heads(row, c), :]


def _store_sums(row: Row, ref: Any, place: Any, c: int, sums: Pair) -> None:
    for i, half in enumerate(sums):
        ref[place + i, _heads(row, c), :] = half


def _heads(row: Row, c: int) -> Any:
    from jax.experimental import pallas as pl

    return pl.ds(c * row.chunk, row.chunk)


def _halves(row: Row) -> tuple[Any, Any]:
    from jax.experimental import pallas as pl

    half = row.head_dim // 2
    return pl.ds(0, half), pl.ds(half, half)
