"""Blockwise attention in plain JAX: the online softmax over chunks, in O(T) memory.

For each query chunk, the loop over the key chunks that the mask lets it see computes:

    m_new = max(m, rowmax(S))
    l_new = exp(m - m_new) * l + rowsum(exp(S - m_new))
    O_new = exp(m - m_new) * O + exp(S - m_new) V            # divided by l once, at the end
    lse   = m + log(l)

The backward recomputes P = exp(S - lse) chunk by chunk from the saved LSE.

Source: Rabe and Staats (arXiv 2112.05682); Dao et al., FlashAttention and FlashAttention-2 (arXiv
2205.14135, 2307.08691), whose B_r and B_c are `query_chunk_size` and `key_chunk_size`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxattn.call import Call
from maxattn.config import AttentionConfig
from maxattn.kernels import softmax
from maxattn.kernels.base import Bias, Grads, Inputs, Kernel, Lines, Result, Rows, Tangents
from maxattn.kernels.blockwise.chunk_sizes import choose_chunks
from maxattn.kernels.blockwise.tiles import (
    ChunkedInputs,
    by_row,
    cut,
    differs_by_row,
    for_visits,
    has_own_rows,
    join,
)
from maxattn.masks.terms import sort_note
from maxattn.target import Target
from maxattn.tuned import tuned_config, tuned_note

MOST_COUNTED = 2**16  # most pairs of chunks that `lines` counts by kind


@dataclass(frozen=True)
class MemoryEfficient(Kernel):
    """Compute out = softmax(scale * q k^T + bias) v chunk by chunk, with XLA's own matmuls."""

    name: ClassVar[str] = "memory_efficient"
    takes_value_dim: ClassVar[bool] = True
    scale: float  # factor of the scores, in float32
    # query_chunk, key_chunk: numbers of queries and keys in a chunk (B_r and B_c)
    query_chunk: int
    key_chunk: int
    float32_qk_product: bool = False  # whether to cast q and k to float32 before their product
    by_row: bool = False  # whether to compute batch rows one by one if their empty chunks differ

    @staticmethod
    def build(call: Call, config: AttentionConfig, target: Target) -> MemoryEfficient:
        config = tuned_config(config, "memory_efficient", call, target)
        chunks = choose_chunks(call, config.query_chunk_size, config.key_chunk_size)
        # A single batch row leaves most of a GPU idle, so there all batch rows run together.
        by_row = target.platform != "gpu" and differs_by_row(call.mask)
        return MemoryEfficient(call.scale, *chunks, config.float32_qk_product, by_row)

    def notes(self, call: Call, config: AttentionConfig, target: Target) -> tuple[str, ...]:
        sort = (sort_note("chunks"),) if self._skips(call) and call.mask.has_ids else ()
        return (*sort, *tuned_note(config, self.name, call, target))

    def _skips(self, call: Call) -> bool:
        return call.mask.bounds_tiles and call.kv_len > self.key_chunk

    def microseconds(self, call: Call, target: Target) -> None:
        """Return None: XLA's matmuls reach neither the peak FLOP/s nor the peak bandwidth."""

    def lines(self, call: Call) -> Lines:
        blocks = f"query_chunk_size {self.query_chunk}, key_chunk_size {self.key_chunk}"
        if self._skips(call):
            rows = ", for each batch row" if self.by_row else ""
            blocks += f"; chunks that the mask's arrays leave empty are skipped{rows}"
        elif call.mask.has_exact_intervals and not (call.mask.is_full or call.sharded):
            sizes = self.query_chunk, self.key_chunk, call.q_len, call.kv_len
            total = -(-sizes[2] // sizes[0]) * -(-sizes[3] // sizes[1])
            if total <= MOST_COUNTED:
                empty, full, mixed = call.mask.block_tally(*sizes)
                blocks += (
                    f"; of {total} pairs of chunks {full} full, {mixed} mixed, {empty} skipped"
                )
        return Lines("dot_product, memory-efficient (blockwise online softmax in JAX)", blocks)

    def forward(self, inputs: Inputs) -> Result:
        if self.by_row and has_own_rows(inputs):
            return by_row(self._forward, inputs)
        return self._forward(inputs)

    def _forward(self, inputs: Inputs) -> Result:
        tiles, length = self._tiles(inputs), inputs.q.shape[1]

        def query_chunk(xs: tuple[Array, ...]) -> tuple[Array, Array]:
            i, q_i, *row = xs

            def step(j: Any, mixed: Any, state: Any) -> Any:
                return _forward_step(tiles.scores(i, q_i, j, mixed), tiles.v[j], *state)

            state = for_visits(tiles.lists, tuple(row), step, _nothing_seen(q_i, tiles.v))
            out, lse = softmax.finish(*state)
            return out.astype(inputs.q.dtype), lse

        out, lse = jax.lax.map(query_chunk, _rows(tiles))
        out, lse = join(out, 3, length), join(lse, 3, length)
        return Result(softmax.merge_queries(out), softmax.merge_stats(lse))

    def tangent(self, inputs: Inputs, result: Result, moved: Tangents) -> Result:
        q, kv_heads = inputs.q, inputs.k.shape[2]
        tiles = self._tiles(inputs)
        whole = moved.whole(inputs)
        dots = self._tiles(inputs.replace(**whole._asdict(), bias_level=None))
        bias = None if moved.bias is None else dots.bias
        lse = softmax.finite(result.lse)
        lse = cut(softmax.split_stats(lse, kv_heads), 3, tiles.q.shape[4], softmax.BIG_LSE)

        def query_chunk(xs: tuple[Array, ...]) -> tuple[Array, Array, Array]:
            i, q_i, *row = xs[:5]

            def step(j: Any, mixed: Any, state: Any) -> Any:
                dk = None if moved.k is None else dots.k[j]
                dv = None if moved.v is None else dots.v[j]
                dbias = None if bias is None else dots.bias_tile(bias, i, j)
                dq = None if moved.q is None else xs[6]
                ds = softmax.score_tangent(q_i, tiles.k[j], dq, dk, dbias, tiles.scale)
                s = tiles.scores(i, q_i, j, mixed)
                return softmax.tile_tangent(s, ds, xs[5], tiles.v[j], dv, state)

            centre, *sums = _nothing_seen(q_i, tiles.v)
            state = (jnp.full_like(centre, jnp.inf), *sums)
            centre, dlse, acc = for_visits(tiles.lists, tuple(row), step, state)
            return dlse, acc, dlse + softmax.known_centre(centre)

        rest, acc, dlse = jax.lax.map(query_chunk, (*_rows(tiles), lse, dots.q))
        rest = softmax.merge_stats(join(rest, 3, q.shape[1]))
        dlse = softmax.merge_stats(join(dlse, 3, q.shape[1]))
        acc = softmax.merge_queries(join(acc, 3, q.shape[1]))
        dout = acc - result.out.astype(jnp.float32) * softmax.column(rest)
        return Result(dout.astype(q.dtype), dlse)

    def backward(self, inputs: Inputs, rows: Rows) -> Grads:
        if self.by_row and has_own_rows(inputs):
            return by_row(self._backward, inputs, rows)
        return self._backward(inputs, rows)

    def _backward(self, inputs: Inputs, rows: Rows) -> Grads:
        q, k = inputs.q, inputs.k
        tiles = self._tiles(inputs)

        def query_chunk(carry: Any, xs: tuple[Array, ...]) -> tuple[Any, Array]:
            i, q_i, *row = xs[:5]

            def step(j: Any, mixed: Any, state: Any) -> Any:
                s = tiles.scores(i, q_i, j, mixed)
                return _backward_step(tiles, i, q_i, j, s, (xs[5], xs[6], xs[7]), *state)

            zero = jnp.zeros_like(q_i, jnp.float32)
            dq_i, *carry = for_visits(tiles.lists, tuple(row), step, (zero, *carry))
            return tuple(carry), dq_i.astype(softmax.gradient_dtype(q))

        parts = tiles.k, tiles.v, tiles.bias
        zeros = tuple(None if x is None else jnp.zeros_like(x, jnp.float32) for x in parts)
        given = _stats_of_chunks(rows, tiles)
        (dk, dv, dbias), dq = jax.lax.scan(query_chunk, zeros, (*_rows(tiles), *given))
        dk, dv = (softmax.merge_keys(join(x, 2, k.shape[1])) for x in (dk, dv))
        dq = softmax.merge_queries(join(dq, 3, q.shape[1]))
        return Grads(dq, dk, dv, _bias_like(dbias, inputs.bias))

    def _tiles(self, inputs: Inputs) -> ChunkedInputs:
        if self.float32_qk_product:
            q, k = (x.astype(jnp.float32) for x in (inputs.q, inputs.k))
            inputs = inputs.replace(q=q, k=k)
        return ChunkedInputs.of(inputs, (self.query_chunk, self.key_chunk), self.scale)


def _rows(tiles: ChunkedInputs) -> tuple[Any, ...]:
    """Return the loop's operands per query chunk: index, queries, and lists of key chunks."""
    return (jnp.arange(tiles.q.shape[0]), tiles.q, *(jnp.asarray(x) for x in tiles.lists))


def _nothing_seen(q_i: Array, v: Array) -> tuple[Array, Array, Array]:
    # All three derive from q_i, so that in a `shard_map` they vary over the same mesh axes as q.
    row = jnp.zeros_like(q_i[..., 0], jnp.float32)
    acc = jnp.broadcast_to(row[..., None], (*row.shape, v.shape[-1]))
    return jnp.full_like(row, softmax.NEG_INF), row, acc


def _forward_step(
    s: Array, v_j: Array, m: Array, l: Array, acc: Array
) -> tuple[Array, Array, Array]:
    m_new = jnp.maximum(m, jnp.max(s, axis=-1))
    decay = jnp.exp(m - jnp.where(m_new == softmax.NEG_INF, 0.0, m_new))
    p = softmax.stable_exp(s, m_new)
    # [B, K, G, bq, bk], [B, K, bk, H] -> [B, K, G, bq, H]
    acc = acc * decay[..., None] + softmax.matmul("bkgts,bksh->bkgth", p.astype(v_j.dtype), v_j)
    return m_new, l * decay + jnp.sum(p, axis=-1), acc


def _stats_of_chunks(rows: Rows, tiles: ChunkedInputs) -> tuple[Array, ...]:
    kv_heads = tiles.k.shape[2]
    stats = (softmax.split_stats(x, kv_heads) for x in (rows.lse, rows.dlse))
    split = (softmax.split_queries(x, kv_heads) for x in (rows.out, rows.dout))
    # Padded queries of the last chunk have scores too: with BIG_LSE, exp(s - lse) is 0.
    fills = (softmax.BIG_LSE, 0.0, 0.0)
    found = zip(softmax.row_gradient(*split, *stats), fills, strict=True)
    return tuple(cut(x, 3, tiles.q.shape[4], fill) for x, fill in found)


def _backward_step(
    tiles: ChunkedInputs,
    i: Any,
    q_i: Array,
    j: Any,
    s: Array,
    given: tuple[Array, Array, Array],
    dq_i: Array,
    dk: Array,
    dv: Array,
    dbias: Array | None,
) -> tuple[Array, Array, Array, Array | None]:
    """Add the gradients of one pair of chunks to (dq of this query chunk, dk, dv, dbias)."""
    dq, dk_j, dv_j, ds = softmax.tile_gradient(q_i, tiles.k[j], tiles.v[j], s, *given, tiles.scale)
    if dbias is not None:
        dbias = tiles.add_bias_tile(dbias, ds, i, j)
    return dq_i + dq, dk.at[j].add(dk_j), dv.at[j].add(dv_j), dbias


def _bias_like(dbias: Array | None, bias: Bias) -> Bias:
    """Cut a padded bias gradient [B|1, K|1, G|1, T, S] to the shape of the bias."""
    if dbias is None or bias is None:
        return None
    dbias = dbias[:, :, :, : bias.shape[2], : bias.shape[3]]
    return dbias.reshape(bias.shape)
