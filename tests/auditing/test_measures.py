"""Each measure of a call equals numpy's in float64; the share of the bound equals a run's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.auditing import LayerAudit
from maxattn.kernels.transposed import tile

GRID = (2, 10, 15)  # of the last 300 of 310 tokens
TOKENS, HEADS, KV_HEADS, DIM = 310, 4, 2, 8
EXACT = ma.AuditSample(queries=None)


def drawn(tokens: int = TOKENS, batch: int = 1) -> list[jax.Array]:
    every = jax.random.normal(jax.random.key(0), (3, batch, tokens, HEADS, DIM))
    return [every[0], *every[1:, :, :, :KV_HEADS]]


def one(*args, **how) -> LayerAudit:
    (layer,) = ma.audit(ma.attention, *args, seconds=0, **how).layers
    return layer


def weights(q, k, allowed=True):
    """Return scores and weights [N, T, S] in float64."""
    q, k = (np.asarray(x[0], np.float64) for x in (q, k))
    k = np.repeat(k, HEADS // KV_HEADS, axis=1)
    s = np.einsum("tnh,snh->nts", q, k) * DIM**-0.5
    e = np.where(allowed, np.exp(s - s.max()), 0)
    return np.where(allowed, np.abs(s), 0), e / e.sum(axis=2, keepdims=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_entropy_and_top_tiles(is_causal):
    q, k, v = drawn(TOKENS + 400)
    mask = ma.masks.Causal() if is_causal else ma.masks.Full()
    allowed = np.tril(np.ones((q.shape[1],) * 2, bool)) if is_causal else True
    s, p = weights(q, k, allowed)
    found = one(q, k, v, mask, sample=EXACT, kernels=()).measures
    np.testing.assert_allclose(found["score"], s.max(axis=(1, 2)), rtol=1e-5)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=2).mean(axis=1)
    np.testing.assert_allclose(found["entropy"], entropy, rtol=1e-4)
    edges = range(0, q.shape[1], 128)
    tiles = np.stack([p[:, :, i : i + 128].sum(axis=2) for i in edges], axis=2)  # [N, T, tiles]
    tiles = np.stack([tiles[:, i : i + 128].mean(axis=1) for i in edges], axis=1)
    top = np.sort(tiles)[:, :, ::-1] @ [1, 177.5 / 128 - 1, 0, 0, 0, 0]  # a quarter of 710 keys
    np.testing.assert_allclose(found["top_tiles"], top.mean(axis=1), rtol=1e-4)


def test_norms_offset_and_outliers():
    q, k, v = drawn()
    k = k.at[..., 3].add(7e3).at[..., 5].multiply(40.0)
    found = one(q, k, v, kernels=()).measures
    keys = np.repeat(np.asarray(k, np.float64)[0], HEADS // KV_HEADS, axis=1)
    q_norm, k_norm = (np.linalg.norm(x, axis=2).max(axis=0) for x in (np.asarray(q)[0], keys))
    np.testing.assert_allclose(found["q_norm"], q_norm, rtol=1e-5)
    np.testing.assert_allclose(found["k_norm"], k_norm, rtol=1e-5)
    np.testing.assert_allclose(found["bound"], q_norm * k_norm * DIM**-0.5, rtol=1e-5)
    offset = np.abs(keys.mean(axis=0)) / keys.std(axis=0)
    np.testing.assert_allclose(found["k_offset"], offset.max(axis=1), rtol=1e-3)
    assert set(found["k_channel"]) == {3.0}
    largest = np.abs(keys).max(axis=0)
    outlier = largest.max(axis=1) / np.median(largest, axis=1)
    np.testing.assert_allclose(found["k_outlier"], outlier, rtol=1e-5)


def test_mass_in_windows_of_a_grid_after_other_tokens():
    q, k, v = drawn()
    found = one(q, k, v, sample=EXACT, grid=GRID, kernels=()).measures
    p = weights(q, k)[1][:, 10:, 10:]
    p = p / p.sum(axis=2, keepdims=True)
    places = np.stack(np.unravel_index(np.arange(300), GRID))
    for name, at in zip(("time", "height", "width"), places, strict=True):
        near = np.abs(at[:, None] - at) <= 1  # an eighth of 2, 10 and 15 is at most 1
        np.testing.assert_allclose(found[name], (p * near).sum(axis=2).mean(axis=1), rtol=1e-4)


def test_int8_loses_what_numpy_s_int8_loses():
    q, k, v = drawn()
    k = k.at[..., 2].add(10.0)
    layer = one(q, k, v, sample=EXACT, kernels=())
    rounded = lambda x: np.round(x / (np.abs(x).max() / 127)) * np.abs(x).max() / 127  # noqa: E731
    values = np.repeat(np.asarray(v, np.float64)[0], HEADS // KV_HEADS, axis=1)
    want = np.einsum("nts,snv->ntv", weights(q, k)[1], values)
    keys = np.asarray(k, np.float64)
    for name, given in (("int8", keys), ("int8_centred", keys - keys.mean(axis=1))):
        p = weights(rounded(np.asarray(q, np.float64)), rounded(given))[1]
        error = np.einsum("nts,snv->ntv", p, values) - want
        loss = np.linalg.norm(error, axis=(1, 2)) / np.linalg.norm(want, axis=(1, 2))
        np.testing.assert_allclose(layer.measures[name], loss, rtol=0.02)
    assert layer.over_heads("int8") > 2 * layer.over_heads("int8_centred")


def test_the_share_outside_of_the_bound_is_that_of_a_run(monkeypatch):
    """`tpu_flash` decides by blocks of queries; the test records its decisions in a run."""
    decided = []

    def listened(*operands):
        found = SMALL(*operands)
        jax.debug.callback(lambda x: decided.append(np.asarray(x)), found)
        return found

    sizes = {"block_q": 128, "block_kv": 128, "block_kv_compute": 128}
    config = ma.AttentionConfig(attention="tpu_flash", flash_block_sizes=sizes)
    q, k, v = drawn(300, batch=2)
    q = q.at[0, 128:256, 1].multiply(200.0).at[:, 280:, 3].multiply(200.0)
    found = one(q, k, v, config=config, kernels=())
    monkeypatch.setattr(tile, "small_scores", listened)
    ma.attention(q, k, v, config=config)
    jax.effects_barrier()
    small = np.concatenate(decided).reshape(2, HEADS, 3)  # batch rows, heads, blocks of queries
    share = ((1 - small) * np.array([128, 128, 44])).sum(axis=(0, 2)) / 600
    np.testing.assert_allclose(found.measures["outside"], share, rtol=1e-6)
    np.testing.assert_allclose(share, [0, 128 / 600, 0, 88 / 600], rtol=1e-6)


SMALL = tile.small_scores


def test_bias_and_lengths_are_in_the_scores():
    q, k, v = drawn(64)
    bias = jnp.zeros((1, 1, 64, 64)).at[..., 40].set(50.0)
    lengths = ma.masks.KeyPadding(jnp.array([41]))
    found = one(q, k, v, lengths, bias, sample=EXACT, kernels=()).measures
    assert min(found["score"]) > 45 and max(found["entropy"]) < 0.01
    hidden = one(q, k, v, ma.masks.KeyPadding(jnp.array([40])), bias, sample=EXACT, kernels=())
    assert max(hidden.measures["score"]) < 10


def test_a_sample_has_its_number_of_queries_and_follows_its_seed():
    for length, count in (1000, 64), (1024, 60), (100, 64), (32760, 2000), (129, 128):
        rows = ma.AuditSample(count).rows(length)
        assert len(set(rows)) == count and min(rows) >= 0 and max(rows) < length
        assert (rows != ma.AuditSample(count, seed=1).rows(length)).any()
        tiles = np.unique(rows // 128, return_counts=True)[1]
        assert len(tiles) <= max(8, 2 + count // 128)
        assert tiles[0] - min(tiles[:-1], default=tiles[0]) in (0, 1)


def test_a_sample_of_heads_is_some_of_all():
    q, k, v = drawn()
    whole, some = one(q, k, v), one(q, k, v, sample=ma.AuditSample(heads=2))
    assert len(some.heads) == 2
    for name in ("score", "entropy", "k_norm", "outside", "error dot_product"):
        wanted = [whole.measures[name][head] for head in some.heads]
        np.testing.assert_allclose(some.measures[name], wanted, rtol=1e-3)
