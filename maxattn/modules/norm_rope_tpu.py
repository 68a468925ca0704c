"""Bias, norm, rotary embedding and transpose of queries or keys, as one kernel on TPUs.

    z = x + bias    u = z / sqrt(mean(z^2) + eps)    n = u * scale    y = C * n + S * swap(n)

`swap` exchanges the two channels of each pair; C and S are cosines and signed sines of all H
channels. The kernel reads rows of channels, [B, T, N*H], as the projection leaves them, and writes
heads first, [B, N, T, H], as the attention kernels read them. Its backward computes z and u again:

    dn = C * dy - S * swap(dy)       dx = (scale * dn - u * mean(scale * dn * u)) / sqrt(...)
"""

from __future__ import annotations

from functools import partial, reduce
from math import lcm
from operator import add
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from maxattn.block_sizes.sizes import LANES
from maxattn.kernels.base import in_default_modes
from maxattn.modules.row_kernel.work import RowWork

NUMBERS = 2**19  # most numbers of a step: some 4,000 bundles, and 8 MiB of VMEM
LEAST = 16  # tokens: the rows of a register in bfloat16
FORWARD, BACKWARD = "norm_rotary_fwd", "norm_rotary_bwd"
Vectors = dict[str, Float[Array, "#N H"]]
Tables = tuple[Array, ...]


def why_not(work: RowWork) -> str:
    """Return why the kernel cannot take these heads, or ""."""
    takes = work.channels % _width(work) == 0 and LEAST * work.channels <= NUMBERS
    return "" if takes else f"the kernel cannot take {work.heads} heads of dim {work.head_dim}"


def _width(work: RowWork) -> int:
    """Return the channels of a chunk: whole heads that are whole registers."""
    return lcm(work.head_dim, LANES)


class RowTiles(NamedTuple):
    """The static facts of a kernel."""

    work: RowWork
    batch: int
    length: int
    example_tables: bool  # whether each batch row has tables of its own
    interpret: bool

    @property
    def tokens(self) -> int:
        """The number of tokens of a step."""
        most = max(LEAST, NUMBERS // self.work.channels // LEAST * LEAST)
        blocks = -(-self.length // most)
        return -(-self.length // blocks // LEAST) * LEAST

    def mean(self, parts: Any) -> Array:
        """Return the mean over a row of the sum of parts, each [tokens, channels of a chunk]."""
        return reduce(add, parts).sum(axis=1, keepdims=True) * (1.0 / self.work.channels)

    def heads_of(self, chunk: slice) -> list[tuple[int, slice]]:
        """Return the heads of a chunk, each with its channels in the chunk."""
        h = self.work.head_dim
        return [
            (start // h, slice(start - chunk.start, start - chunk.start + h))
            for start in range(chunk.start, chunk.stop, h)
        ]

    def block(self, of: str) -> Any:
        """Return a step's block of "rows", "heads", "cos", "sin" or, by another name, a vector."""
        from jax.experimental import pallas as pl

        work, own = self.work, self.example_tables
        table = (None, self.tokens, _width(work)), lambda b, i: (b if own else 0, i, 0)
        blocks = {
            "rows": ((None, self.tokens, work.channels), lambda b, i: (b, i, 0)),
            "heads": ((None, work.heads, self.tokens, work.head_dim), lambda b, i: (b, 0, i, 0)),
            **dict.fromkeys(("cos", "sin"), table),
        }
        return pl.BlockSpec(*blocks.get(of, ((1, work.channels), lambda b, i: (0, 0))))

    def run(self, kernel: Any, name: str, **how: Any) -> Any:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        grid = self.batch, -(-self.length // self.tokens)
        numbers = self.batch * self.length * self.work.channels
        cost = pl.CostEstimate(flops=12 * numbers, transcendentals=0, bytes_accessed=4 * numbers)
        order = pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary"))
        run = pl.pallas_call(
            kernel, grid=grid, compiler_params=order, cost_estimate=cost, name=name,
            interpret=self.interpret, **how,
        )  # fmt: skip
        return in_default_modes(run)


def forward(
    work: RowWork, x: Float[Array, "B T N H"], vectors: Vectors, tables: Tables, interpret: bool
) -> Float[Array, "B T N H"]:
    """Normalise and rotate; the result is a view of an array [B, N, T, H]."""
    (b, t, n, h), operands = x.shape, _operands(work, vectors, tables)
    blocks = RowTiles(work, b, t, bool(tables) and len(tables[0]) == b > 1, interpret)
    run = blocks.run(
        partial(_forward, blocks, tuple(operands)),
        FORWARD,
        in_specs=[blocks.block(name) for name in ("rows", *operands)],
        out_specs=blocks.block("heads"),
        out_shape=jax.ShapeDtypeStruct((b, n, t, h), x.dtype),
    )
    return run(x.reshape(b, t, n * h), *operands.values()).swapaxes(1, 2)


def backward(
    work: RowWork,
    x: Float[Array, "B T N H"],
    vectors: Vectors,
    tables: Tables,
    dy: Float[Array, "B T N H"],
    interpret: bool,
) -> tuple[Float[Array, "B T N H"], Vectors]:
    """Return the gradients of x and of the vectors, in the shapes of these."""
    from jax.experimental.pallas import tpu as pltpu

    (b, t, n, h), operands = x.shape, _operands(work, vectors, tables)
    blocks = RowTiles(work, b, t, bool(tables) and len(tables[0]) == b > 1, interpret)
    of_vector = jax.ShapeDtypeStruct((1, n * h), jnp.float32)
    run = blocks.run(
        partial(_backward, blocks, tuple(operands), tuple(vectors)),
        BACKWARD,
        in_specs=[blocks.block(name) for name in ("rows", "heads", *operands)],
        out_specs=[blocks.block(name) for name in ("rows", *vectors)],
        out_shape=[jax.ShapeDtypeStruct((b, t, n * h), x.dtype), *(of_vector for _ in vectors)],
        scratch_shapes=[pltpu.VMEM((blocks.tokens, n * h), jnp.float32)],
    )
    dx, *sums = run(x.reshape(b, t, n * h), dy.swapaxes(1, 2), *operands.values())
    # A vector that all heads share has one row, [1, H]: its gradient is summed over the heads.
    of_vectors = {
        name: found.reshape(v.shape[0], -1, h).sum(axis=1).astype(v.dtype)
        for (name, v), found in zip(vectors.items(), sums, strict=True)
    }
    return dx.reshape(x.shape), of_vectors


def _operands(work: RowWork, vectors: Vectors, tables: Tables) -> dict[str, Array]:
    """Return the vectors as [1, N*H], and the tables as [B or 1, T, channels of a chunk]."""
    found = {
        name: jnp.broadcast_to(v.astype(jnp.float32), (work.heads, work.head_dim)).reshape(1, -1)
        for name, v in vectors.items()
    }
    if not tables:
        return found
    cos, sin = tables
    copies = _width(work) // work.head_dim
    # The halves of a head, or the two channels of each pair, side by side.
    axis = 2 if work.style == "half" else 3
    whole = {"cos": (cos, cos), "sin": (-sin, sin)}
    return found | {
        name: jnp.tile(jnp.stack(pair, axis).reshape(*cos.shape[:2], -1), (1, 1, copies))
        for name, pair in whole.items()
    }


# ---- one step ------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Reads one chunk of a step's rows, in float32."""

    blocks: RowTiles
    read: dict[str, Any]
    columns: slice

    @staticmethod
    def all(blocks: RowTiles, read: dict[str, Any]) -> list[_Chunk]:
        width = _width(blocks.work)
        starts = range(0, blocks.work.channels, width)
        return [_Chunk(blocks, read, slice(i, i + width)) for i in starts]

    def of(self, name: str, default: float) -> Any:
        return self.read[name][:, self.columns] if name in self.read else default

    def z(self) -> Array:
        return self.read["x"][:, self.columns].astype(jnp.float32) + self.of("bias", 0.0)

    def rotated(self, x: Array, back: bool = False) -> Array:
        """Rotate, or rotate back."""
        if self.blocks.work.style is None:
            return x
        turned = _swap(x, self.blocks.work) * self.read["sin"][...]
        return x * self.read["cos"][...] + (-turned if back else turned)

    def mean(self, x: Array) -> Array:
        """Return the mean over each head, for all channels of the head."""
        work, lane = self.blocks.work, lax.broadcasted_iota(jnp.int32, x.shape, 1)
        found = jnp.zeros_like(x)
        for _, columns in self.blocks.heads_of(self.columns):
            inside = (lane >= columns.start) & (lane < columns.stop)
            total = jnp.where(inside, x, 0.0).sum(axis=1, keepdims=True)
            found = jnp.where(inside, total * (1.0 / work.head_dim), found)
        return found


def _swap(x: Float[Array, "q W"], work: RowWork) -> Float[Array, "q W"]:
    """Exchange the channels of each pair, which are `apart` channels from each other."""
    from jax.experimental.pallas import tpu as pltpu

    width, apart = x.shape[1], work.head_dim // 2 if work.style == "half" else 1
    if 2 * apart == width:
        return pltpu.roll(x, apart, 1)
    is_first = lax.broadcasted_iota(jnp.int32, x.shape, 1) % (2 * apart) < apart
    return jnp.where(is_first, pltpu.roll(x, width - apart, 1), pltpu.roll(x, apart, 1))


def _forward(blocks: RowTiles, names: tuple[str, ...], x: Any, *refs: Any) -> None:
    *operands, out = refs
    read, work = dict(zip(names, operands, strict=True)) | {"x": x}, blocks.work
    chunks, across = _Chunk.all(blocks, read), None
    if work.norm == "across":
        across = lax.rsqrt(blocks.mean(jnp.square(c.z()) for c in chunks) + work.eps)
    for chunk in chunks:
        z = chunk.z()
        if work.norm is not None:
            r = lax.rsqrt(chunk.mean(z * z) + work.eps) if across is None else across
            z = z * r * chunk.of("scale", 1.0)
        y = chunk.rotated(z).astype(out.dtype)
        for head, columns in blocks.heads_of(chunk.columns):
            out[head] = y[:, columns]


def _backward(
    blocks: RowTiles, names: tuple[str, ...], vectors: tuple[str, ...], x: Any, dy: Any, *refs: Any
) -> None:
    from jax.experimental import pallas as pl

    operands, (dx, *sums, kept) = refs[: len(names)], refs[len(names) :]
    read, work = dict(zip(names, operands, strict=True)) | {"x": x}, blocks.work
    of_vectors, block = dict(zip(vectors, sums, strict=True)), pl.program_id(1)

    @pl.when((pl.program_id(0) == 0) & (block == 0))
    def _() -> None:
        for each in sums:
            each[...] = jnp.zeros(each.shape, jnp.float32)

    shape = blocks.tokens, 1
    is_real = lax.broadcasted_iota(jnp.int32, shape, 0) + block * blocks.tokens < blocks.length

    def real(value: Array) -> Array:
        # Past the last token a block has any values, which no sum may contain.
        return value if blocks.length % blocks.tokens == 0 else jnp.where(is_real, value, 0.0)

    chunks, squares, products = _Chunk.all(blocks, read), [], []
    for chunk in chunks:
        heads = [dy[head].astype(jnp.float32) for head, _ in blocks.heads_of(chunk.columns)]
        dn = real(chunk.rotated(jnp.concatenate(heads, axis=1), back=True))
        kept[:, chunk.columns] = dn
        if work.norm == "across":
            z = real(chunk.z())
            squares.append(z * z)
            products.append(dn * chunk.of("scale", 1.0) * z)
    across = None
    if work.norm == "across":
        r = lax.rsqrt(blocks.mean(squares) + work.eps)
        across = r, r * blocks.mean(products)
    for chunk in chunks:
        z, dz = real(chunk.z()), kept[:, chunk.columns]
        if work.norm is not None:
            h = dz * chunk.of("scale", 1.0)
            r = across[0] if across else lax.rsqrt(chunk.mean(z * z) + work.eps)
            mean = across[1] if across else r * chunk.mean(h * z)
            u = z * r
            if "scale" in of_vectors:
                of_vectors["scale"][:, chunk.columns] += (dz * u).sum(axis=0, keepdims=True)
            dz = r * (h - u * mean)
        if "bias" in of_vectors:
            of_vectors["bias"][:, chunk.columns] += dz.sum(axis=0, keepdims=True)
        dx[:, chunk.columns] = dz.astype(dx.dtype)
