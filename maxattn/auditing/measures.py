"""Measure one attention call on its own operands, head by head, inside a traced program.

Norms, offsets and the bound of `tpu_flash` are of all tokens. Scores, entropy, masses and errors
are of sampled queries: some query tiles, and some queries of each, against all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from maxattn.block_sizes.transposed import forward_tile
from maxattn.config import FlashBlockSizes
from maxattn.config.numbers import whole
from maxattn.errors import InputError, brief
from maxattn.jax_private.observed import MarkedCall
from maxattn.kernels.transposed.few_keys import LN2, LOG2E
from maxattn.kernels.transposed.tile import score_limit, small_scores
from maxattn.sharding import pad_axis

TILE, TILES, SHARE = 128, 8, 0.25
"""Tokens of a tile; how many query tiles are sampled; the share of key tiles that are the top."""
WINDOW = 8  # a window reaches 1/8 of an axis to both sides
TINY = 1e-30
AXES = ("time", "height", "width")


@dataclass(frozen=True)
class AuditSample:
    """The queries, heads and calls of a program that are audited, chosen by a seed.

    Args:
        queries: number of queries of a call whose scores are computed, spread over 8 or more query
            tiles of one batch row; None for all queries of that batch row. Default 64.
        heads: number of heads of a call; default all.
        calls: number of calls in the program, such as layers; default all.
        seed: seeds the choice; default 0.
        outputs: whether errors of outputs are computed too, of 8 bits and of kernels; default True.

    >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 8, 16))
    >>> sample = ma.AuditSample(queries=32, heads=2, outputs=False)
    >>> len(ma.audit(ma.attention, q, k, v, sample=sample).layers[0].heads)
    2
    """

    queries: int | None = 64
    heads: int | None = None
    calls: int | None = None
    seed: int = 0
    outputs: bool = True

    def __post_init__(self) -> None:
        for name, least in (("queries", 1), ("heads", 1), ("calls", 1), ("seed", 0)):
            value = getattr(self, name)
            if whole(value, least) is None and (value is not None or name == "seed"):
                rule = f"it must be a whole number of at least {least}"
                remedy = f"give {name}=8, or leave {name} out"
                raise InputError(f"sample.{name}", brief(value), rule, remedy)

    def some(self, most: int, wanted: int | None, salt: int) -> np.ndarray:
        """Choose `wanted` of `most` numbers, sorted; all if it is None or larger."""
        if wanted is None or wanted >= most:
            return np.arange(most)
        return np.sort(np.random.default_rng((self.seed, salt)).choice(most, wanted, False))

    def heads_of(self, heads: int) -> np.ndarray:
        return self.some(heads, self.heads, salt=0)

    def rows(self, length: int) -> np.ndarray:
        """Choose queries of a sequence."""
        if self.queries is None or self.queries >= length:
            return np.arange(length)
        tiles = max(TILES, 1 + ceil(self.queries / TILE))  # one more, since the last may be short
        chosen = self.some(ceil(length / TILE), min(tiles, self.queries), salt=1)
        orders = [
            np.random.default_rng((self.seed, 3 + t)).permutation(min(TILE, length - t * TILE))
            for t in chosen
        ]
        queries = np.concatenate([t * TILE + x for t, x in zip(chosen, orders, strict=True)])
        ranks = np.concatenate([np.arange(len(x)) for x in orders])
        return np.sort(queries[np.argsort(ranks, kind="stable")[: self.queries]])


class SampledRows(NamedTuple):
    """Sampled queries of one batch row, and their softmax in float32, for the chosen heads.

    k and v are of each query head's key head. Scores s have scale and bias, and are -inf where the
    mask hides a key; weights p are 0 for a query that sees no key.
    """

    q: Float[Array, "R N H"]
    k: Float[Array, "S N H"]
    v: Float[Array, "S N V"]
    s: Float[Array, "N R S"]
    p: Float[Array, "N R S"]
    rows: np.ndarray
    batch_row: int

    @property
    def wanted(self) -> Float[Array, "R N V"]:
        """The output in float32."""
        return weighted(self.p, self.v)


def measures_of(
    call: MarkedCall, operands: Any, every: Sequence[Array], sample: AuditSample,
    grid: tuple[int, ...] | None,
) -> dict[str, Float[Array, " N"]]:  # fmt: skip
    """Return each measure by name, a number for each chosen head; NaN where it does not apply.

    The operands are (q, k, v, bias, mask), `every` has q, k and v of all examples of a `vmap`, and
    the grid is that of the last tokens, if known.
    """
    heads, of_keys = _heads(operands, sample)
    q, (k, v) = every[0][:, :, heads], (x[:, :, of_keys] for x in every[1:])
    found, rows = _of_all_tokens(call, q, k, v), sampled(call, operands, sample)
    found |= _of_softmax(rows) | _of_windows(rows, grid)
    if sample.outputs:
        found |= _of_8_bits(call, rows)
    return {"ran": jnp.ones(q.shape[2])} | {n: x.astype(jnp.float32) for n, x in found.items()}


def _heads(operands: Any, sample: AuditSample) -> tuple[Any, Any]:
    """Return indices of the chosen query heads and of their key heads, without a copy for all."""
    heads, kv_heads = operands[0].shape[2], operands[1].shape[2]
    chosen = sample.heads_of(heads)
    if len(chosen) == heads == kv_heads:
        return slice(None), slice(None)
    return chosen, chosen // (heads // kv_heads)


def sampled(call: MarkedCall, operands: Any, sample: AuditSample) -> SampledRows:
    """Compute the softmax of the sampled queries."""
    q, k, v, bias, mask = operands
    b, rows = int(sample.some(q.shape[0], 1, salt=2)[0]), sample.rows(q.shape[1])
    heads, of_keys = _heads(operands, sample)
    q, k, v = q[b][rows][:, heads], k[b][:, of_keys], v[b][:, of_keys]
    s = products(q, k) * call.plan.call.scale

    def of_row(x: Any) -> Any:
        x = x[b if x.shape[0] > 1 else 0]
        return x[heads] if x.shape[0] > 1 else x

    if bias is not None:
        s = s + of_row(bias[:, :, rows] if bias.shape[2] > 1 else bias).astype(jnp.float32)
    s = jnp.where(of_row(mask.allowed(rows, np.arange(len(k)))), s, -jnp.inf)
    return SampledRows(q, k, v, s, softmax(s), rows, b)


def products(q: Float[Array, "R N H"], k: Float[Array, "S N H"]) -> Float[Array, "N R S"]:
    exact = "highest" if q.dtype == jnp.float32 else None
    return jnp.einsum("rnh,snh->nrs", q, k, precision=exact, preferred_element_type=jnp.float32)


def softmax(s: Float[Array, "N R S"]) -> Float[Array, "N R S"]:
    top = s.max(axis=2, keepdims=True)
    p = jnp.exp(s - jnp.where(jnp.isneginf(top), 0, top))
    return p / jnp.maximum(p.sum(axis=2, keepdims=True), TINY)


def weighted(p: Float[Array, "N R S"], v: Float[Array, "S N V"]) -> Float[Array, "R N V"]:
    return jnp.einsum("nrs,snv->rnv", p, v.astype(jnp.float32), precision="highest")


def mean_of(x: Float[Array, "N R"], live: Bool[Array, "N R"]) -> Float[Array, " N"]:
    return jnp.where(live, x, 0).sum(axis=1) / jnp.maximum(live.sum(axis=1), 1)


def relative_error(got: Float[Array, "R N V"], want: Float[Array, "R N V"]) -> Float[Array, " N"]:
    """Return the relative L2 error of each head."""
    error, size = (jnp.square(x).sum(axis=(0, 2)) for x in (got.astype(jnp.float32) - want, want))
    return jnp.sqrt(error / jnp.where(size == 0, 1, size))


# ---- all tokens ----------------------------------------------------------------------------------


def _of_all_tokens(
    call: MarkedCall, q: Float[Array, "B T N H"], k: Float[Array, "B S N H"],
    v: Float[Array, "B S N V"],
) -> dict[str, Array]:  # fmt: skip
    q_norm, k_norm = (jnp.sqrt(jnp.square(x.astype(jnp.float32)).sum(axis=3)) for x in (q, k))
    q_norm, k_norm = q_norm.max(axis=1), k_norm.max(axis=1)
    found = {"q_norm": q_norm.max(axis=0), "k_norm": k_norm.max(axis=0)}
    found["bound"] = abs(call.plan.call.scale) * (q_norm * k_norm).max(axis=0)
    for name, x in (("bad_q", q), ("bad_k", k), ("bad_v", v)):
        found[name] = (~jnp.isfinite(x)).sum(axis=(0, 1, 3))
    return found | _of_running_maximum(call, q, k, v) | _of_channels(k)


def _of_running_maximum(call: MarkedCall, q: Array, k: Array, v: Array) -> dict[str, Array]:
    """Return the share of queries in blocks that `tpu_flash` gives a running maximum."""
    plan, tokens = call.plan, q.shape[1]
    if q.dtype == jnp.float16:
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    if plan.kernel.name == "tpu_flash":
        block = plan.kernel.for_inference().blocks.block_q
    else:
        local = plan.strategy.local_call(plan.padded_call)
        block = forward_tile(FlashBlockSizes(), local, plan.target)[0][0]
    scaled = (q.astype(jnp.float32) * (plan.call.scale * LOG2E)).astype(q.dtype)
    padded = pad_axis(scaled, 1, ceil(tokens / block) * block)
    heads_first = *_, values = [x.swapaxes(1, 2) for x in (padded, k, v)]
    limit = jax.vmap(score_limit)(values).min(axis=0) * LN2
    small = jax.vmap(lambda q, k, v: small_scores(q, k, v, block))(*heads_first)
    large = 1 - small.reshape(q.shape[0], q.shape[2], -1)
    sizes = np.minimum(block, tokens - np.arange(0, tokens, block))
    outside = (large * sizes).sum(axis=(0, 2)) / (tokens * q.shape[0])
    return {"outside": outside, "limit": limit}


def _of_channels(k: Float[Array, "B S N H"]) -> dict[str, Array]:
    """Return the largest mean of a channel in standard deviations over tokens, and outliers."""
    x = k.astype(jnp.float32)
    mean = x.mean(axis=1)
    deviation = jnp.sqrt(jnp.square(x - mean[:, None]).mean(axis=1))
    # A channel that is constant counts as 1e4 deviations.
    offset = (jnp.abs(mean) / jnp.maximum(deviation, 1e-4 * jnp.abs(mean) + TINY)).max(axis=0)
    largest = jnp.abs(x).max(axis=(0, 1))
    outlier = largest.max(axis=1) / jnp.maximum(jnp.median(largest, axis=1), TINY)
    return {"k_offset": offset.max(1), "k_channel": offset.argmax(1), "k_outlier": outlier}


# ---- sampled queries -----------------------------------------------------------------------------


def _of_softmax(sampled: SampledRows) -> dict[str, Array]:
    s, p, tiles = sampled.s, sampled.p, sampled.rows // TILE
    entropy = -(p * jnp.log(jnp.where(p > 0, p, 1))).sum(axis=2)
    numbers, counts = np.unique(tiles, return_counts=True)
    member = ((tiles == numbers[:, None]) / counts[:, None]).astype(np.float32)  # [tiles, R]
    keys = ceil(s.shape[2] / TILE)
    sizes = jnp.minimum(TILE, s.shape[2] - TILE * np.arange(keys))
    mass = pad_axis(p, 2, keys * TILE).reshape(*p.shape[:2], keys, TILE).sum(axis=3)
    mass = jnp.einsum("tr,nrk->ntk", member, mass, precision="highest")
    order = jnp.argsort(-mass, axis=2)
    ordered, sizes = jnp.take_along_axis(mass, order, axis=2), sizes[order]
    # The last of the top tiles counts by its share of the keys.
    left = SHARE * s.shape[2] - (jnp.cumsum(sizes, axis=2) - sizes)
    top = (ordered * jnp.clip(left / sizes, 0, 1)).sum(axis=2).mean(axis=1)
    return {
        "score": jnp.where(jnp.isneginf(s), 0, jnp.abs(s)).max(axis=(1, 2)),
        "entropy": mean_of(entropy, ~jnp.isneginf(s).all(axis=2)),
        "top_tiles": top if SHARE * keys >= 1 else jnp.full_like(top, jnp.nan),
    }


def reach(size: int) -> int:
    """Return how far a window reaches to both sides on an axis of a grid."""
    return max(1, size // WINDOW)


def _of_windows(sampled: SampledRows, grid: tuple[int, ...] | None) -> dict[str, Array]:
    """Return the mass within a window of each axis, of all mass on the tokens of the grid."""
    nothing = jnp.full(sampled.p.shape[0], jnp.nan)
    found: dict[str, Array] = dict.fromkeys(AXES, nothing)
    if grid is None:
        return found
    first = sampled.p.shape[2] - int(np.prod(grid))
    inside = np.flatnonzero(sampled.rows >= first)
    p = sampled.p[:, inside, first:]
    total = p.sum(axis=2)
    tokens = sampled.rows[inside] - first, np.arange(p.shape[2])
    q_at, k_at = (np.unravel_index(each, grid) for each in tokens)
    for name, q, k, size in zip(AXES[-len(grid) :], q_at, k_at, grid, strict=True):
        near = jnp.abs(jnp.asarray(q)[:, None] - jnp.asarray(k)) <= reach(size)
        mass = jnp.where(near, p, 0).sum(axis=2) / jnp.maximum(total, TINY)
        found[name] = mean_of(mass, total > 0) if len(inside) else nothing
    return found


def _of_8_bits(call: MarkedCall, sampled: SampledRows) -> dict[str, Array]:
    """Return the error of the output if Q and K are int8, K as it is or centred.

    Each has one scale for all chosen heads of the batch row; Q's is of the sampled queries.
    """
    scale, want = call.plan.call.scale, sampled.wanted
    q, k = sampled.q.astype(jnp.float32), sampled.k.astype(jnp.float32)
    rest = sampled.s - products(sampled.q, sampled.k) * scale  # bias and mask

    def error(k: Array) -> Array:
        s = products(_int8(q), _int8(k)) * scale + rest
        return relative_error(weighted(softmax(s), sampled.v), want)

    return {"int8": error(k), "int8_centred": error(k - k.mean(axis=0))}


def _int8(x: Float[Array, "..."]) -> Float[Array, "..."]:
    step = jnp.maximum(jnp.abs(x).max(), TINY) / 127
    return jnp.round(x / step) * step
