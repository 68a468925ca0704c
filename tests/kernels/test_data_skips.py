"""The blockwise kernel skips chunks that lengths, flags and segment ids leave empty."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.blockwise import tiles
from maxattn.kernels.blockwise.visits import visits
from tests.cases import compare
from tests.reference import attention64
from tests.waiting import but

CHUNK = 16
SETTINGS = {"attention": "dot_product", "use_memory_efficient_attention": True}
CONFIG = ma.AttentionConfig(**SETTINGS, query_chunk_size=CHUNK, key_chunk_size=CHUNK)
BATCH, T, S = 3, 70, 90
RNG = np.random.default_rng(0)


def ids_of(*rows: tuple[int, ...]) -> np.ndarray:
    return np.stack([np.repeat(np.arange(len(row)), row) for row in rows]).astype(np.int32)


SORTED = M.Segments(
    ids_of((30, 25, 15), (70,), (5, 5, 60)), ids_of((30, 40, 20), (90,), (60, 20, 10))
)
UNSORTED = M.Segments(RNG.integers(-1, 4, (BATCH, T)), RNG.integers(-1, 4, (BATCH, S)))
SHARED = M.Segments(ids_of((30, 40)), ids_of((80, 10)))
PADDING = M.KeyPadding(np.array([90, 17, 0]))
FLAGS = M.KeyPadding(RNG.random((BATCH, S)) < np.array([[0.9], [0.05], [0.0]]))
TABLE = M.Dense(RNG.random((BATCH, 1, T, S)) < 0.5)
MASKS = {
    "sorted": SORTED,
    "unsorted": UNSORTED,
    "shared": SHARED,
    "padding of ids": M.Segments(ids_of((40, 30)) - 1, ids_of((20, 70)) - 1),
    "rows of keys that are padding": M.Segments(
        np.zeros((BATCH, T), int), np.where(np.arange(S) < np.array([[90], [17], [40]]), 0, -1)
    ),
    "largest ids": M.Segments(2**31 - 1 - ids_of((40, 30)), 2**31 - 2 + ids_of((20, 70))),
    "lengths": PADDING,
    "flags": FLAGS,
    "causal & lengths": M.Causal() & PADDING,
    "window & segments & flags": M.LocalWindow(20, 10) & SORTED & FLAGS,
    "segments | sink": SORTED | M.KeyLimit(3),
    "not segments": ~SORTED & M.Causal(),
    "not lengths": ~PADDING,
    "table | lengths": TABLE | PADDING,
    "table & segments": TABLE & SORTED,
}


def allowed(mask: M.Mask, t: int = T, s: int = S) -> np.ndarray:
    found = np.asarray(mask.bind(t, s).allowed(np.arange(t), np.arange(s)))
    return np.broadcast_to(found[:, 0], (found.shape[0], t, s))


def operands(batch: int = BATCH, t: int = T, s: int = S) -> tuple[Any, ...]:
    rng = np.random.default_rng(1)
    shapes = [(batch, t, 4, 8), (batch, s, 2, 8), (batch, s, 2, 8), (batch, t, 4, 8)]
    return tuple(jnp.asarray(rng.normal(size=shape), "float32") for shape in shapes)


def gradients(mask: M.Mask, *x: Any, bias: Any = None, **settings: Any) -> tuple[Any, ...]:
    """Return the output, and the gradients of q, k, v and bias for a weighted sum of it."""
    *qkv, weight = x

    def loss(qkv: Any, bias: Any) -> tuple[Any, Any]:
        out = ma.attention(*qkv, mask=mask, bias=bias, **({"config": CONFIG} | settings))
        return (out * weight).sum(), out

    (_, out), (dqkv, dbias) = jax.value_and_grad(loss, (0, 1), has_aux=True)(qkv, bias)
    return (out, *dqkv) if bias is None else (out, *dqkv, dbias)


def judge(found: tuple[Any, ...], mask: M.Mask, *x: Any, bias: Any = None) -> None:
    *qkv, weight = x
    out, *grads = found
    compare((out, None, *grads), attention64(*qkv, allowed(mask)[:, None], bias, dout=weight))


def tile_by_tile(table: np.ndarray, block: int = CHUNK) -> tuple[np.ndarray, np.ndarray]:
    """Return for each tile of a table [B, T, S] whether any pair, and whether all are allowed."""
    rows, columns = (range(0, n, block) for n in table.shape[1:])
    cut = [[table[:, i : i + block, j : j + block] for j in columns] for i in rows]
    some = np.array([[tile.any() for tile in row] for row in cut])
    return some, np.array([[tile.all() for tile in row] for row in cut])


def listed(mask: M.Mask) -> tuple[np.ndarray, np.ndarray]:
    """Return which chunks are visited, and in which of them pairs are tested."""
    lists = jax.jit(lambda m: visits(m, CHUNK, CHUNK, T, S))(mask.bind(T, S))
    rows, columns = -(-T // CHUNK), -(-S // CHUNK)
    found = np.zeros((2, rows, columns), bool)
    for i in range(rows):
        for at in range(int(lists.count[i])):
            found[:, i, lists.index[i, at]] = True, lists.mixed[i, at]
    return found[0], found[1]


# Of sorted ids and of lengths nothing empty is visited, and nothing full is tested.
EXACT = ("sorted", "shared", "padding of ids", "lengths", "causal & lengths", "not lengths")


@pytest.mark.parametrize("name", MASKS)
def test_what_is_skipped_is_empty_and_what_is_not_tested_is_full(name: str) -> None:
    visited, tested = listed(MASKS[name])
    some, every = tile_by_tile(allowed(MASKS[name]))
    assert not (some & ~visited).any() and not (visited & ~tested & ~every).any()
    if name in EXACT:
        assert (visited == some).all() and not (tested & every).any()


# Every mask meets a bias, of each batch row or of all, or a call without.
PLAIN = ("shared", "largest ids", "not segments", "not lengths", "table & segments")
BIASED = [(name, "none" if name in PLAIN else "BNTS") for name in MASKS] + [("sorted", "11TS")]
SHAPES = {"BNTS": (BATCH, 4, T, S), "11TS": (1, 1, T, S)}


@pytest.mark.parametrize(("name", "bias"), but(product(MASKS, ("none", *SHAPES)), BIASED))
def test_against_float64(name: str, bias: str) -> None:
    x, drawn = operands(), None
    if bias != "none":
        drawn = jnp.asarray(RNG.normal(size=SHAPES[bias]), "float32")
    judge(jax.jit(gradients)(MASKS[name], *x, bias=drawn), MASKS[name], *x, bias=drawn)


@pytest.mark.parametrize("name", ["rows of keys that are padding", "lengths", "flags"])
def test_what_one_batch_row_leaves_empty_is_not_read(name: str) -> None:
    """NaN in keys that a batch row should skip would spoil its output: 0 * NaN is NaN."""
    q, k, v, _ = operands()
    some = [tile_by_tile(row[None])[0].any(axis=0) for row in allowed(MASKS[name])]
    hidden = ~np.repeat(np.stack(some), CHUNK, axis=1)[:, :S]
    assert hidden.any()
    k, v = (jnp.where(hidden[:, :, None, None], jnp.nan, x) for x in (k, v))
    assert np.isfinite(np.asarray(ma.attention(q, k, v, mask=MASKS[name], config=CONFIG))).all()


def test_packed_sequences_compute_the_chunks_of_their_segments_alone(monkeypatch) -> None:
    """Eight segments of 64 in chunks of 16: 8 x 4 x 4 of 32 x 32, forward and backward."""
    length, calls = 8 * 64, []
    scores = tiles.ChunkedInputs.scores

    def counted(self: Any, i: Any, q_i: Any, j: Any, mixed: Any) -> Any:
        jax.debug.callback(lambda *at: calls.append(tuple(map(int, at))), i, j, mixed)
        return scores(self, i, q_i, j, mixed)

    monkeypatch.setattr(tiles.ChunkedInputs, "scores", counted)
    ids, x = jnp.asarray(ids_of((64,) * 8)), jnp.ones((1, length, 1, 1))
    jax.block_until_ready(gradients(M.Segments(ids, ids), x, x, x, x))
    jax.effects_barrier()
    want = [(i, j, 0) for i in range(32) for j in range(32) if i // 4 == j // 4]
    assert sorted(calls) == sorted(2 * want)


def test_under_remat_and_scan() -> None:
    x = operands()

    @jax.checkpoint
    def loss(*x: Any) -> Any:
        return (ma.attention(*x[:3], mask=SORTED, config=CONFIG) * x[3]).sum()

    def scanned(*x: Any) -> Any:
        return jax.lax.scan(lambda c, _: (c, jax.grad(loss, (0, 1, 2))(*x)), 0, None, 2)[1]

    want = attention64(*x[:3], allowed(SORTED)[:, None], dout=x[3])
    compare((None, None, *(y[1] for y in jax.jit(scanned)(*x))), want)


def test_under_vmap_of_arrays_and_masks() -> None:
    """Each example has its own ids, and a batch of one."""
    x = tuple(y[:, None] for y in operands())
    q_ids, kv_ids = (jnp.asarray(ids)[:, None] for ids in (SORTED.q_ids, SORTED.kv_ids))

    def one(q_ids: Any, kv_ids: Any, *x: Any) -> Any:
        return gradients(M.Segments(q_ids, kv_ids), *x)

    found = jax.jit(jax.vmap(one))(q_ids, kv_ids, *x)
    judge(tuple(y[:, 0] for y in found), SORTED, *operands())


def test_the_plan_says_what_is_skipped_and_how_to_sort() -> None:
    shape = jax.ShapeDtypeStruct((2, 8192, 2, 64), "float32")
    ids = jax.ShapeDtypeStruct((2, 8192), "int32")
    config = ma.AttentionConfig(**SETTINGS)
    segments = ma.plan(ma.Call.of(shape, shape, mask=M.Segments(ids, ids)), config).explain()
    skips = "chunks that the mask's arrays leave empty are skipped, for each batch row"
    assert f"key_chunk_size 512; {skips}" in segments
    assert "jnp.argsort(ids, axis=1)" in segments
    lengths = M.KeyPadding(jax.ShapeDtypeStruct((2,), "int32"))
    padded = ma.plan(ma.Call.of(shape, shape, mask=lengths), config).explain()
    assert f"key_chunk_size 1024; {skips}" in padded and "argsort" not in padded
    table = M.Dense(jax.ShapeDtypeStruct((2, 1, 8192, 8192), "bool"))
    assert "skipped" not in ma.plan(ma.Call.of(shape, shape, mask=table), config).explain()
