"""The kernels of `tpu_few_keys`: attention to few keys, such as cross-attention to a text.

One tile has all keys, so each step computes whole softmaxes, without running statistics:

    S^T = k q^T    P^T = exp2(S^T)    out^T = v^T P^T / sum(P^T)

Floats have equal precision at every magnitude, so no maximum is subtracted at first. If a query's
sum of weights is then not between the bounds `SUMS`, the step is computed again with the maximum of
each query. In most models scores are small, and no step is computed twice.

The operands are as projections leave them, [B, T, N*H]: a step reads some query heads as columns.
So no array is transposed or padded around the kernels, except K and V, which are short. K is
multiplied by the scale and by log2(e). Queries past the last one are computed and not written.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from maxattn.block_sizes.few_keys import FewKeysTile
from maxattn.block_sizes.sizes import LANES, round_up
from maxattn.kernels.base import in_default_modes
from maxattn.kernels.softmax import BIG_LSE, LN2, LOG2E
from maxattn.kernels.transposed.tile import MASKED, by_sublane, product
from maxattn.sharding import pad_axis

# If a sum of weights is in these bounds, no weight and no product with V has overflowed, and what
# underflowed is below 2**-32 of the sum.
SUMS = 2.0**-60, 2.0**60
FORWARD, BACKWARD = "tpu_few_keys_fwd", "tpu_few_keys_dkv"
BACKWARD_BLOCKS = ("queries", "keys", "keys", "turned", "queries", "rows", "rows")


class FewKeysCall(NamedTuple):
    """The operands of a call, in the layout of the kernels, and its static facts."""

    q: Float[Array, "B T NH"]  # [B, T, N*H]
    # k, v: [B, S', K*H], padded to S' keys; k is multiplied by scale * log2(e)
    k: Float[Array, "B S KH"]
    v: Float[Array, "B S KH"]
    # [B], the number of keys that each batch row sees; None if all rows see all keys
    lengths: Int[Array, " B"] | None
    # heads, kv_heads: N and K
    heads: int
    kv_heads: int
    kv_len: int  # S, the number of keys without padding
    tile: FewKeysTile  # numbers of queries, and of query heads, of a step

    @staticmethod
    def of(
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        lengths: Int[Array, " B"] | None,
        scale: float,
        tile: FewKeysTile,
    ) -> FewKeysCall:
        heads, (kv_len, kv_heads) = q.shape[2], k.shape[1:3]
        scaled = (k.astype(jnp.float32) * (scale * LOG2E)).astype(q.dtype)
        k, v = (pad_axis(_flat(x), 1, round_up(kv_len, LANES)) for x in (scaled, v))
        return FewKeysCall(_flat(q), k, v, lengths, heads, kv_heads, kv_len, tile)

    @property
    def head_dim(self) -> int:
        return self.q.shape[2] // self.heads

    @property
    def grid(self) -> tuple[int, int, int]:
        """Batch rows, groups of heads, and query blocks."""
        blocks = -(-self.q.shape[1] // self.tile.queries)
        return self.q.shape[0], self.heads // self.tile.heads, blocks

    @property
    def kv_heads_of_step(self) -> int:
        return self.tile.heads * self.kv_heads // self.heads

    @property
    def may_see_nothing(self) -> bool:
        return self.lengths is not None

    @property
    def hides(self) -> bool:
        """Whether a step tests which keys are visible."""
        return self.may_see_nothing or self.kv_len < self.k.shape[1]

    def columns(self, head: int) -> tuple[slice, slice]:
        """Return the columns of a step's query head, and those of its key head."""
        h, key_head = self.head_dim, head * self.kv_heads // self.heads
        return slice(head * h, (head + 1) * h), slice(key_head * h, (key_head + 1) * h)

    def block(self, of: str) -> Any:
        """Return a block of "queries", "keys", "turned" keys [B, K*H, S'], "rows" [B, N, 1, T]."""
        from jax.experimental import pallas as pl

        queries, heads, keys = self.tile.queries, self.tile.heads, self.k.shape[1]
        width, of_keys = heads * self.head_dim, self.kv_heads_of_step * self.head_dim
        blocks = {
            "queries": ((None, queries, width), lambda b, n, i, *_: (b, i, n)),
            "keys": ((None, keys, of_keys), lambda b, n, i, *_: (b, 0, n)),
            "turned": ((None, of_keys, keys), lambda b, n, i, *_: (b, n, 0)),
            "rows": ((None, heads, 1, queries), lambda b, n, i, *_: (b, n, 0, i)),
        }
        return pl.BlockSpec(*blocks[of])

    def run(self, kernel: Any, name: str, products: int, interpret: bool, **specs: Any) -> Any:
        """Return the function of the operands that runs a kernel over the grid."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import tpu as pltpu

        b, t, _ = self.q.shape
        pairs, size = b * t * self.heads * self.k.shape[1], self.q.dtype.itemsize
        moved = (2 if products == 2 else 3) * self.q.size * size
        specs |= {"in_specs": [pl.BlockSpec(memory_space=pltpu.SMEM), *specs["in_specs"]]}
        return pl.pallas_call(
            kernel,
            grid=self.grid,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            cost_estimate=pl.CostEstimate(
                flops=2 * products * pairs * self.head_dim,
                transcendentals=pairs,
                bytes_accessed=moved,
            ),
            interpret=interpret,
            name=name,
            **specs,
        )

    @property
    def counts(self) -> Int[Array, " B"]:
        """The number of visible keys of each batch row."""
        every = jnp.full(self.q.shape[0], self.kv_len, jnp.int32)
        return every if self.lengths is None else self.lengths.astype(jnp.int32)


# ---- the forward ---------------------------------------------------------------------------------


def forward(
    call: FewKeysCall, interpret: bool
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T"]]:
    """Return the output, 0 for rows without keys, and the natural-log LSE, then -inf."""
    b, t, _ = call.q.shape
    run = call.run(
        partial(_forward, call),
        FORWARD,
        2,
        interpret,
        in_specs=[call.block(name) for name in ("queries", "keys", "turned")],
        out_specs=[call.block(name) for name in ("queries", "rows")],
        out_shape=[
            jax.ShapeDtypeStruct(call.q.shape, call.q.dtype),
            jax.ShapeDtypeStruct((b, call.heads, 1, t), jnp.float32),
        ],
    )
    operands = call.counts, call.q, call.k, call.v.swapaxes(1, 2)
    out, lse = in_default_modes(run)(*operands)
    return out.reshape(b, t, call.heads, call.head_dim), lse[:, :, 0] * LN2


def _forward(call: FewKeysCall, counts: Any, q: Any, k: Any, v: Any, out: Any, lse: Any) -> None:
    from jax.experimental import pallas as pl

    row, block = pl.program_id(0), pl.program_id(2)

    def compute(with_maximum: bool) -> tuple[Array, Array]:
        """Compute a step; return the least and the largest sum of weights of each query."""
        low, high = jnp.float32(jnp.inf), jnp.float32(0)
        for head in range(call.tile.heads):
            cols, key_cols = call.columns(head)
            s = product(k[:, key_cols], q[:, cols], 1, 1)  # C H, q H -> C q
            if call.hides:
                s = jnp.where(_visible(s, counts[row]), s, MASKED)
            m = by_sublane(s, jnp.max).max(axis=0, keepdims=True) if with_maximum else 0.0
            p = jnp.exp2(s - m) if with_maximum else jnp.exp2(s)
            l = by_sublane(p, jnp.sum).sum(axis=0, keepdims=True)
            acc = product(v[key_cols, :], p.astype(v.dtype), 1, 0)  # H C, C q -> H q
            share, base2 = 1.0 / l, m + jnp.log2(l)
            if call.may_see_nothing:
                share, base2 = (
                    jnp.where(counts[row] > 0, x, other)
                    for x, other in ((share, 0.0), (base2, -jnp.inf))
                )
            out[:, cols] = (acc * share).T.astype(out.dtype)
            lse[head] = base2
            low, high = jnp.minimum(low, l), jnp.maximum(high, l)
        return low, high

    low, high = compute(with_maximum=False)
    least, most = SUMS
    index = lax.broadcasted_iota(jnp.int32, low.shape, 1) + block * call.tile.queries
    is_exact = ((low >= least) & (high <= most)) | (index >= call.q.shape[1])

    # NaN is not exact either.
    @pl.when(jnp.where(is_exact, 0.0, 1.0).max() > 0)
    def _() -> None:
        compute(with_maximum=True)


# ---- the backward --------------------------------------------------------------------------------


def backward(
    call: FewKeysCall,
    lse: Float[Array, "B N T"],
    delta: Float[Array, "B N T"],
    dout: Float[Array, "B T N H"],
    interpret: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Return dq in q's dtype, and dk and dv in float32; dk is not multiplied by the scale.

    Args:
        call: the operands.
        lse: natural logs; any large number for a query that sees no key.
        delta: sum(dout * out) - dlse.
        dout: the output's gradient.
        interpret: whether to run in Pallas' interpreter.
    """
    from jax.experimental.pallas import tpu as pltpu

    b, t, _ = call.q.shape
    whole = call.grid[2] * call.tile.queries
    rows = pad_axis(lse, 2, whole, BIG_LSE) * LOG2E, pad_axis(delta, 2, whole)
    width, keys = call.kv_heads_of_step * call.head_dim, call.k.shape[1]
    of_sum = jax.ShapeDtypeStruct((b, call.k.shape[2], keys), jnp.float32)
    run = call.run(
        partial(_backward, call),
        BACKWARD,
        5,
        interpret,
        in_specs=[call.block(name) for name in BACKWARD_BLOCKS],
        out_specs=[call.block(name) for name in ("queries", "turned", "turned")],
        out_shape=[jax.ShapeDtypeStruct(call.q.shape, call.q.dtype), of_sum, of_sum],
        scratch_shapes=[pltpu.VMEM((width, keys), jnp.float32) for _ in range(2)],
    )
    operands = call.counts, call.q, call.k, call.v, call.k.swapaxes(1, 2), _flat(dout)
    dq, *sums = in_default_modes(run)(*operands, *(x[:, :, None] for x in rows))
    dk, dv = (
        x.swapaxes(1, 2)[:, : call.kv_len].reshape(b, call.kv_len, call.kv_heads, call.head_dim)
        for x in sums
    )
    return dq.reshape(b, t, call.heads, call.head_dim), dk, dv


def _backward(
    call: FewKeysCall, counts: Any, q: Any, k: Any, v: Any, turned: Any, dout: Any, lse: Any,
    delta: Any, dq: Any, dk: Any, dv: Any, sum_k: Any, sum_v: Any,
) -> None:  # fmt: skip
    from jax.experimental import pallas as pl

    b, block = pl.program_id(0), pl.program_id(2)

    @pl.when(block == 0)
    def _() -> None:
        sum_k[...] = jnp.zeros(sum_k.shape, jnp.float32)
        sum_v[...] = jnp.zeros(sum_v.shape, jnp.float32)

    for head in range(call.tile.heads):
        cols, key_cols = call.columns(head)
        queries, gradient = (_real(x[:, cols], call, block) for x in (q, dout))
        p = jnp.exp2(product(k[:, key_cols], queries, 1, 1) - lse[head])  # C H, q H -> C q
        if call.hides:
            p = jnp.where(_visible(p, counts[b]), p, 0.0)
        dp = product(v[:, key_cols], gradient, 1, 1)  # C H, q H -> C q
        ds = (p * (dp - delta[head])).astype(k.dtype)
        sum_v[key_cols, :] += product(gradient.T, p.astype(v.dtype), 1, 1)  # H q, C q -> H C
        sum_k[key_cols, :] += product(queries.T, ds, 1, 1)
        dq[:, cols] = (LN2 * product(turned[key_cols, :], ds, 1, 0)).T.astype(dq.dtype)

    @pl.when(block == pl.num_programs(2) - 1)
    def _() -> None:
        dk[...], dv[...] = sum_k[...], sum_v[...]


def _real(x: Float[Array, "q H"], call: FewKeysCall, block: Any) -> Float[Array, "q H"]:
    """Return x with 0 past the last query, where a block that is cut off has any values."""
    length, size = call.q.shape[1], call.tile.queries
    if length % size == 0:
        return x
    index = lax.broadcasted_iota(jnp.int32, x.shape, 0) + block * size
    return jnp.where(index < length, x, jnp.zeros_like(x))


def _visible(s: Float[Array, "C q"], count: Any) -> Any:
    return lax.broadcasted_iota(jnp.int32, s.shape, 0) < count


def _flat(x: Float[Array, "B T N H"]) -> Float[Array, "B T NH"]:
    return x.reshape(*x.shape[:2], -1)
