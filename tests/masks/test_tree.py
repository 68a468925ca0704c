"""Masks as values: pytrees, forms, hashes, axes of leaves; under jit, vmap and grad."""

from __future__ import annotations

import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn import masks as M

LENGTHS = jnp.array([2, 5], jnp.int32)
FLAGS = jnp.arange(2 * 6).reshape(2, 6) % 3 > 0
IDS = jnp.array([[0, 0, 1, 1], [0, 1, 2, -1]], jnp.int32)
KV_IDS = jnp.array([[0, 0, 0, 1, 1, -1], [0, 1, 2, 2, 2, 2]], jnp.int32)
TABLE = jnp.arange(4 * 6).reshape(4, 6) % 5 > 0

MASKS = {
    "full": M.Full(),
    "causal": M.Causal(),
    "video": M.VideoMask(3, 2, 2, window=2, sink=1),
    "lengths": M.KeyPadding(LENGTHS),
    "flags": M.KeyPadding(FLAGS),
    "segments": M.Segments(IDS, KV_IDS),
    "dense": M.Dense(TABLE),
    "all of it": (M.Causal() | ~M.KeyPadding(LENGTHS)) & M.Segments(IDS, KV_IDS) & M.Dense(TABLE)
    | M.KeyLimit(1),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_pytree_whose_form_is_a_key(name: str) -> None:
    mask = MASKS[name]
    leaves, tree = jax.tree.flatten(mask)
    assert jax.tree.unflatten(tree, leaves) == mask
    assert all(isinstance(x, jax.Array) for x in leaves)
    assert jax.tree.structure(jax.tree.map(jnp.logical_not, mask)) == tree
    mask = mask.bind(4, 6)
    again = jax.tree.map(jnp.copy, mask)
    assert hash(mask.form()) == hash(again.form()) and mask.form() == again.form()
    assert {mask.form(): 1}[again.form()] == 1
    assert mask.form().form() == mask.form()
    assert repr(mask.form()) == repr(mask)
    assert mask.form().bind(4, 6) == mask.form()
    assert pickle.loads(pickle.dumps(mask.form())) == mask.form()


def test_forms_differ_where_they_should() -> None:
    forms = [mask.bind(4, 6).form() for mask in MASKS.values()]
    forms += [M.Causal(offset=1), M.KeyPadding(LENGTHS[:1]).form()]
    assert len(set(forms)) == len(forms)


def test_a_list_of_joined_masks_becomes_a_tuple_and_arrays_are_not_hashed() -> None:
    pair = (M.Causal(0), M.KeyLimit(2))
    for kind in (M.And, M.Or):
        made, of_list = kind(pair), kind([*pair])  # type: ignore[arg-type]
        assert of_list == made
        assert hash(jax.tree.structure(of_list)) == hash(jax.tree.structure(made))
    with pytest.raises(TypeError, match=r"hash its form\(\)"):
        hash(M.KeyPadding(LENGTHS))


def test_axes_of_leaves() -> None:
    axes = {name: jax.tree.leaves(MASKS[name].bind(4, 6).leaf_axes()) for name in MASKS}
    assert axes["causal"] == [] and axes["lengths"] == ["B"] and axes["flags"] == ["BS"]
    assert axes["segments"] == ["BT", "BS"] and axes["dense"] == ["11TS"]
    assert sorted(axes["all of it"]) == ["11TS", "B", "BS", "BT"]
    assert jax.tree.leaves(M.Dense(jnp.ones((2, 1, 4, 1), bool)).leaf_axes()) == ["B1T1"]
    assert jax.tree.leaves(M.KeyPadding([3]).leaf_axes()) == ["1"]
    sizes = {"B": 2, "T": 4, "S": 6, "1": 1}
    for mask in (mask.bind(4, 6) for mask in MASKS.values()):
        for x, axes in zip(*map(jax.tree.leaves, (mask, mask.leaf_axes())), strict=True):
            assert x.shape == tuple(sizes[a] for a in axes)


@pytest.mark.parametrize("name", MASKS)
def test_traced_leaves_and_traced_offsets(name: str) -> None:
    """One trace serves all offsets and all arrays: of pairs, and of the intervals of queries."""
    traces = []

    @jax.jit
    def ask(mask: M.Mask, q_offset: jax.Array, kv_offset: jax.Array) -> Any:
        traces.append(1)
        bound, at = mask.bind(4, 6), jnp.arange(4)
        ends = (bound.intervals(at + q_offset, jnp, data) for data in (True, False))
        return bound.allowed(at, jnp.arange(6), q_offset, kv_offset), jax.tree.leaves([*ends])

    mask, at = MASKS[name].bind(4, 6), np.arange(4)
    host = jax.tree.map(np.asarray, mask)
    for q, kv in ((0, 0), (3, 1), (1, 4)):
        want, (got, ends) = host.allowed(at, np.arange(6), q, kv), ask(mask, q, kv)
        assert isinstance(want, np.ndarray)
        np.testing.assert_array_equal(got, want)
        wanted = [host.intervals(at + q, data=data) for data in (True, False)]
        jax.tree.map(np.testing.assert_array_equal, ends, jax.tree.leaves(wanted))
    assert len(traces) == 1


@pytest.mark.slow
def test_vmap_over_the_batch_of_the_leaves() -> None:
    """Mapping over the batch leaves one batch row, which binds as a batch of one."""
    tables = jnp.stack([TABLE, ~TABLE])
    mask = M.KeyPadding(LENGTHS) & M.KeyPadding(FLAGS) & M.Segments(IDS, KV_IDS) & M.Dense(tables)

    def row(one: M.Mask) -> jax.Array:
        return one.bind(4, 6).allowed(jnp.arange(4), jnp.arange(6))[0]

    want = mask.bind(4, 6).allowed(np.arange(4), np.arange(6))
    np.testing.assert_array_equal(jax.vmap(row)(mask), want)


def test_a_mask_goes_through_grad_scan_and_remat() -> None:
    mask = (M.Causal() & M.KeyPadding(LENGTHS)).bind(4, 6)

    @jax.checkpoint
    def loss(x: jax.Array, mask: M.Mask) -> jax.Array:
        def step(carry: M.Mask, i: jax.Array) -> tuple[M.Mask, jax.Array]:
            return carry, jnp.where(carry.allowed(i[None], jnp.arange(6)), x, 0).sum()

        return jax.lax.scan(step, mask, jnp.arange(4))[1].sum()

    # Rows see 3, 4, 5, 6 keys, of which the batch rows have 2 and 5.
    assert jax.grad(loss)(jnp.float32(1), mask) == (2 * 4) + (3 + 4 + 5 + 5)
