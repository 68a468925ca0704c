"""Masks as values: pytrees, forms, hashes, axes of leaves; under jit, vmap and grad."""

from __future__ import annotations

import pickle

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


def test_a_list_of_joined_masks_becomes_a_tuple() -> None:
    pair = (M.Causal(0), M.KeyLimit(2))
    for kind in (M.And, M.Or):
        assert kind([*pair]) == kind(pair)  # type: ignore[arg-type]
        assert hash(jax.tree.structure(kind([*pair]))) == hash(jax.tree.structure(kind(pair)))  # type: ignore[arg-type]


def test_arrays_are_not_hashed() -> None:
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
    """One trace serves all offsets and all arrays."""
    traces = []

    @jax.jit
    def ask(mask: M.Mask, q_offset: jax.Array, kv_offset: jax.Array) -> jax.Array:
        traces.append(1)
        bound = mask.bind(4, 6)
        return jnp.asarray(bound.allowed(jnp.arange(4), jnp.arange(6), q_offset, kv_offset))

    mask = MASKS[name].bind(4, 6)
    host = jax.tree.map(np.asarray, mask)
    for q, kv in ((0, 0), (3, 1), (1, 4)):
        want = host.allowed(np.arange(4), np.arange(6), q, kv)
        assert isinstance(want, np.ndarray)
        np.testing.assert_array_equal(ask(mask, jnp.int32(q), jnp.int32(kv)), want)
    assert len(traces) == 1


def test_traced_positions() -> None:
    mask = MASKS["all of it"].bind(4, 6)

    def bounds(offset: jax.Array) -> list[jax.Array]:
        upper = mask.intervals(jnp.arange(4) + offset, jnp)
        return jax.tree.leaves((upper, mask.intervals(jnp.arange(4), jnp, False)))

    want = jax.tree.leaves(
        (mask.intervals(np.arange(4) + 2), mask.intervals(np.arange(4), data=False))
    )
    for got, expected in zip(jax.jit(bounds)(jnp.int32(2)), want, strict=True):
        assert got.dtype == jnp.int32
        np.testing.assert_array_equal(got, expected)


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


def test_no_array_of_all_pairs_in_a_jaxpr_of_bounds() -> None:
    mask = M.BlockSlidingWindow(1560, 7).bind(32_760, 32_760)
    jaxpr = jax.make_jaxpr(lambda o: mask.intervals(jnp.arange(32_760) + o, jnp))(0)
    assert max(v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars) == 32_760
