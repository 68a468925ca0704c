"""Segments whose lengths are known when tracing: one more mask of positions, in every kernel."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Inputs
from maxattn.kernels.blockwise.visits import visits
from maxattn.kernels.fa4 import mask_inputs
from maxattn.kernels.flash import Flash
from maxattn.kernels.splash import mask_codes
from maxattn.masks.tile_kinds import tile_kinds
from maxattn.tools.cli.masks import read_mask
from tests.context_parallel.test_ring import CONFIG as RING
from tests.context_parallel.test_ring import qkv, sends
from tests.reference import attention64, error

TILE = 128
LENGTHS = (200, 56, 1, 255)
SUM = sum(LENGTHS)
BLOCKWISE = {"attention": "dot_product", "use_memory_efficient_attention": True}
KERNELS = {
    "dot_product": {"attention": "dot_product"},
    "memory_efficient": BLOCKWISE | {"query_chunk_size": TILE, "key_chunk_size": TILE},
    "flash": {"attention": "flash", "flash_block_sizes": {"block_q": TILE, "block_kv": TILE}},
}
PACKED = M.Segments.of_lengths(LENGTHS)
MASKS = {
    "packed": PACKED,
    "other keys": M.Segments.of_lengths(LENGTHS, (12, 300, 0, 200)),
    "causal": PACKED & M.Causal(),
    "sink": PACKED | M.KeyLimit(16),
    "others": ~PACKED,
    "padded": PACKED & M.KeyPadding(np.array([400])),
}


def by_ids(lengths: tuple[int, ...]) -> np.ndarray:
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return ids[:, None] == ids[None]


def test_equal_masks_are_equal_however_they_are_said() -> None:
    of = M.Segments.of_lengths
    assert of((4, 0, 3)) == of([4, 3], (4, 3)) == of(np.array([4, 3]))
    assert hash(of((4, 3))) == hash(of([4, 3])) and of((4, 3)) != of((3, 4))
    assert of((4, 3)) & of((4, 3)) == of((4, 3))
    assert of((4, 4, 3)).bind(11, 11) == M.BlockSlidingWindow(4, 1, 0)
    assert of((11,)).bind(11, 11) == M.Full()
    assert of((4, 7), (7, 4)).bind(11, 11) == of((4, 7), (7, 4))
    assert pickle.loads(pickle.dumps(of((4, 3)))) == of((4, 3))
    assert read_mask("segments:4,3+causal") == of((4, 3)) & M.Causal()


def test_what_is_written_is_short() -> None:
    assert str(M.Segments.of_lengths((512,) * 7 + (3,))) == "Segments.of_lengths((512 x 7, 3))"
    many = str(M.Segments.of_lengths(range(1, 1001)))
    assert many.endswith("8, ... 1000 segments of 500500 tokens))") and len(many) < 100


def test_millions_of_tokens_in_thousands_of_segments() -> None:
    """The counts are those of each segment alone."""
    lengths = np.random.default_rng(0).integers(1, 9000, 4000)
    total = int(lengths.sum())
    assert total > 10**7
    mask = (M.Segments.of_lengths(lengths) & M.Causal()).bind(total, total)
    assert mask.allowed_pairs(total, total) == int((lengths * (lengths + 1) // 2).sum())
    empty, full, mixed = mask.block_tally(TILE, TILE, total, total)
    blocks = -(-total // TILE)
    assert empty + full + mixed == blocks**2
    across = -(-lengths // TILE) + 1  # blocks that a segment can lie in
    assert blocks <= full + mixed <= (across * (across + 1) // 2).sum()


def test_every_list_of_tiles_leaves_out_what_is_between_segments() -> None:
    mask = PACKED.bind(SUM, SUM)
    want = by_ids(LENGTHS).reshape(4, TILE, 4, TILE).any((1, 3))
    some = want.sum()
    assert some == 8
    assert visits(mask, TILE, TILE, SUM, SUM).count.sum() == some
    assert ((tile_kinds(mask, TILE, TILE, SUM, SUM, 0, 0) != M.EMPTY) == want).all()
    x = jnp.zeros((1, SUM, 2, 64), jnp.bfloat16)
    given = mask_inputs.listed(Inputs(x, x, x, None, mask))
    assert given.pairs is not None and given.pairs.tiles is not None
    assert given.pairs.tiles.tiling.backward.work.sum() >= some


@pytest.mark.parametrize("name", ["packed", "other keys", "causal", "sink", "others"])
def test_flash_attention_4_tests_the_same_pairs(name: str) -> None:
    """Its kernel looks each query's intervals up, as it does at traced positions."""
    mask = MASKS[name].bind(SUM, SUM)
    x = jnp.zeros((1, SUM, 2, 64), jnp.bfloat16)
    pairs = mask_inputs.listed(Inputs(x, x, x, None, mask)).pairs
    assert pairs is not None and pairs.tiles is not None
    at = np.arange(SUM)
    arrays = tuple(np.asarray(x) for x in mask_inputs.arrays(pairs))
    found = pairs.tiles.test(0, at[:, None], at[None], arrays, np)
    want = np.asarray(mask.allowed(at, at))[0, 0]
    assert (np.asarray(found) == want).all()
    assert pairs.tiles.all_see == bool(want.any(axis=1).all())


def by_kernel() -> list[Any]:
    """Let dense, which reads a table of pairs, meet one mask, what skips tiles all, and flash,
    which is interpreted, one of each form.
    """
    few = {"dot_product": ["packed"], "flash": ["other keys", "causal", "sink"]}
    return [
        pytest.param(name, kernel, marks=() if name in few.get(kernel, MASKS) else pytest.mark.slow)
        for name in MASKS
        for kernel in KERNELS
    ]


@pytest.mark.parametrize(("name", "kernel"), by_kernel())
def test_forward_and_gradients_against_float64(name: str, kernel: str) -> None:
    mask, config = MASKS[name], ma.AttentionConfig(**KERNELS[kernel])
    rng = np.random.default_rng(0)
    q, k, v, weight = (jnp.asarray(rng.normal(size=(1, SUM, 2, 64)), "float32") for _ in range(4))

    def loss(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = ma.attention(*x, mask=mask, config=config)
        return (out * weight).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    at = np.arange(SUM)
    allowed = np.asarray(mask.bind(SUM, SUM).allowed(at, at))
    want = attention64(q, k, v, allowed, dout=weight)
    assert max(error(g, w) for g, w in zip((out, *grads), want[:1] + want[2:5], strict=True)) < 2e-5


@pytest.mark.parametrize("kernel", ["memory_efficient", "flash"])
def test_a_kernel_never_reads_what_is_between_segments(kernel: str) -> None:
    """Keys that are NaN spoil every query tile that reads their tile."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, SUM, 2, 64)), "float32") for _ in range(3))
    spoilt = jnp.arange(SUM)[None, :, None, None] >= SUM - TILE
    k, v = (jnp.where(spoilt, jnp.nan, x) for x in (k, v))
    out = ma.attention(q, k, v, mask=PACKED, config=ma.AttentionConfig(**KERNELS[kernel]))
    assert np.isfinite(np.asarray(out[:, :TILE])).all()
    assert np.isnan(np.asarray(out[:, -TILE:])).any()


def test_a_kernel_goes_through_few_segments_by_arithmetic() -> None:
    """What is computed inside a kernel, without a table, is what is looked up outside of one."""
    mask, at = M.Segments.of_lengths((5, 0, 9, 2), (3, 4, 0, 9)), np.arange(16, dtype=np.int32)
    code = mask_codes.Positions(mask, 16, 0)
    rows, keys = (jnp.asarray(x) for x in np.broadcast_arrays(at[:, None], at[None]))
    assert (np.asarray(code(rows, keys)) == np.asarray(mask.allowed(at, at))[0, 0]).all()


def test_splash_refuses_more_segments_than_it_goes_through() -> None:
    length = 2**20
    lengths = (length // 2, *(length // 2 // 128 - i % 2 * 2 + 1 for i in range(128)))
    call = ma.Call(1, length, length, 1, 1, 64, mask=M.Segments.of_lengths(lengths))
    reason = Flash.supports(call, ma.Target.named("TPU v5p"))
    assert reason is not None and "up to 64 segments" in reason.rule
    few = ma.Call(1, 4096, 4096, 1, 1, 64, mask=M.Segments.of_lengths((63, *range(1, 90), 28)))
    assert Flash.supports(few, ma.Target.named("TPU v5p")) is None


def test_hops_between_segments_are_not_made() -> None:
    """Eight ranks of eight tokens: all segments within one, or one of them on two.

    On two, K and V take the hops to either neighbour, and their gradients one home beside these.
    """
    assert sends(M.Segments.of_lengths((8, 5, 3, 8, 2, 6, 8, 8, 8, 8))) == (0, 0)
    assert sends(M.Segments.of_lengths((8, 16, 5, 3, 8, 8, 8, 8))) == (4, 4 + 4 + 6)


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "all_gather"])
def test_on_a_mesh_against_float64(strategy: str) -> None:
    config = RING.replace(attention="dot_product", context_parallel=strategy)
    mask, x = M.Segments.of_lengths((9, 1, 30, 21)), qkv(61, heads=8)
    mesh = config.make_mesh()

    def loss(*x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = ma.attention(*x, mask=mask, config=config, mesh=mesh)
        return out.sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*x)
    want = attention64(*x, by_ids((9, 1, 30, 21)), dout=np.ones(x[0].shape))
    assert max(error(g, w) for g, w in zip((out, *grads), want[:1] + want[2:5], strict=True)) < 2e-5
