"""Passes over block-sparse lists that are split: over queries where keys are few, and over keys."""

from __future__ import annotations

import heapq
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.fa4 import (
    band_lists,
    block_sparse,
    mask_inputs,
    split_keys_lists,
    split_lists,
)
from maxattn.kernels.fa4 import kernel as fa4_kernel
from maxattn.kernels.fa4.block_sparse import TilePass, padded
from maxattn.kernels.fa4.block_sparse_lists import (
    TileLists,
    TilingSpec,
    tiling,
    visits_by_keys,
    visits_by_queries,
)
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fa4.launch_order import START
from maxattn.kernels.fa4.split_keys import wide
from maxattn.kernels.fa4.split_lists import ListedWork, split, splits_of
from maxattn.kernels.softmax import NEG_INF
from tests.reference import attention64, error
from tests.waiting import but

H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))
CONFIG = ma.AttentionConfig(attention="flash")
RNG = np.random.default_rng(4)

# ---- the lists of splits -------------------------------------------------------------------------


def drawn(shape: tuple[int, ...], most: int = 13) -> TileLists:
    """Draw lists of rows in which every tile is mixed, full or neither."""
    kinds = RNG.integers(0, 3, (*shape, most))
    kinds[..., 0, :] = 0
    parts = []
    for kind in (1, 2):
        count = (kinds == kind).sum(-1).astype(np.int32)
        tiles = np.argsort(kinds != kind, axis=-1, stable=True).astype(np.int32)
        parts += [count, tiles]
    return TileLists(*parts)


def named(lists: TileLists, at: tuple[int, ...]) -> list[list[int]]:
    """Return the mixed and the full tiles of a row."""
    counts = lists.mixed_count[at], lists.full_count[at]
    each = zip(counts, (lists.mixed[at], lists.full[at]), strict=True)
    return [np.asarray(tiles)[: int(count)].tolist() for count, tiles in each]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("shape", [(7,), (3, 7)])
def test_splits_share_out_every_list_evenly(
    shape: tuple[int, ...], splits: int, traced: bool
) -> None:
    lists = drawn(shape)
    given = TileLists(*map(jnp.asarray, lists)) if traced else lists
    found = jax.jit(split, static_argnums=1)(given, splits) if traced else split(given, splits)
    batch = 1 if len(shape) == 1 else shape[0]
    assert found.mixed_count.shape == (splits * batch, 7)
    work = np.asarray(lists.work)
    for at in np.ndindex(shape):
        b, row = (0, *at)[-2:]
        each = [named(found, (p * batch + b, row)) for p in range(splits)]
        for i, tiles in enumerate(named(lists, at)):
            assert sorted(column for part in each for column in part[i]) == tiles
        sizes = [len(mixed) + len(full) for mixed, full in each]
        assert max(sizes) - min(sizes) <= 2 and sum(sizes) == work[at]


def test_tiles_that_do_not_divide_go_to_splits_from_either_end() -> None:
    """One tile to test and one to take whole: each of two splits has one."""
    one, tiles = np.array([1], np.int32), np.array([[0], [1]], np.int32)
    assert split(TileLists(one, tiles[:1], one, tiles[1:]), 2).work.tolist() == [[1], [1]]


@pytest.mark.parametrize(
    "mask", [M.Causal(0), M.LocalWindow(300, 40, offset=0), M.BlockCausal(70, 0), M.Full()]
)
def test_visits_are_those_of_the_lists(mask: M.Mask) -> None:
    bound, lengths = mask.bind(1500, 333), (1500, 333)
    lists = tiling(TilingSpec(bound, (128, 64), (64, 128), lengths), (0, 0))
    assert (visits_by_queries(bound, (128, 64), lengths) == lists.forward.work).all()
    assert (visits_by_keys(bound, (64, 128), lengths) == lists.backward.work).all()


# ---- how many ------------------------------------------------------------------------------------


def played(work: ListedWork, splits: int, sms: int) -> float:
    """Return when a pass ends, thread block by thread block."""
    free = [0.0] * sms
    for _ in range(splits * work.lanes):
        for tiles in work.tiles.tolist():
            heapq.heapreplace(free, free[0] + -(-tiles // splits) + START)
    return max(free)


@pytest.mark.parametrize("sms", [132, 78])
def test_splits_end_sooner(sms: int) -> None:
    rng, chosen = np.random.default_rng(0), 0
    for _ in range(200):
        rows, lanes = int(rng.integers(1, 6)), int(rng.integers(1, 60))
        work = ListedWork(rng.integers(0, int(rng.integers(1, 900)), rows), lanes)
        splits = splits_of([work], 1e6, sms)
        best = min(played(work, n, sms) + split_lists.SUMS for n in (2, 3, 5, 8, 11, 16))
        assert splits > 1 or best > 0.8 * played(work, 1, sms) - split_lists.LEAST_TILES
        if splits > 1:
            assert played(work, splits, sms) + split_lists.SUMS < played(work, 1, sms)
        chosen += splits > 1
    assert 50 < chosen < 200


def call_of(sizes: tuple[int, ...], mask: M.Mask) -> ma.Call:
    return ma.Call(*sizes, "bfloat16", mask=mask.bind(*sizes[1:3]))


FEW = (2, 54016, 257, 2, 2, 128)


@pytest.mark.parametrize(
    ("sizes", "mask", "splits"),
    [
        (FEW, M.Causal(0), 11),  # 12 thread blocks, for 132 SMs
        ((2, 54016, 257, 8, 2, 128), M.Causal(0), 11),  # heads that share keys
        (FEW, M.LocalWindow(50000, 64, offset=0), 11),
        (FEW, M.BlockCausal(40, 0), 11),
        (FEW, M.Causal(0) & M.KeyLimit(257), 11),
        ((1, 4096, 4096, 8, 8, 64), M.Causal(), 1),
        ((1, 32760, 32760, 12, 12, 128), M.BlockSlidingWindow(1560, 7), 1),
        ((1, 65536, 257, 2, 2, 128), M.LocalWindow(64, 64, offset=0), 1),  # few queries see a key
        ((1, 300, 64, 2, 2, 128), M.Causal(0), 1),  # too short
    ],
)
def test_what_is_split_over_queries(sizes: tuple[int, ...], mask: M.Mask, splits: int) -> None:
    call = call_of(sizes, mask)
    lines = Fa4.build(call, CONFIG, H200).lines(call)
    assert (f"in {splits} splits of the queries" in lines.backward) is (splits > 1)
    assert Fa4.splits_backward(call, H200) is (splits > 1)
    smaller = ma.Target("gpu", "NVIDIA A100", (("fa4-jax", "0.1.0"),))
    assert "splits" not in Fa4.build(call, CONFIG, smaller).lines(call).backward


@pytest.mark.parametrize(
    ("sizes", "mask", "splits"),
    [
        ((1, 512, 32768, 12, 12, 128), M.LocalWindow(16000, 0), 5),
        ((1, 1560, 32760, 12, 12, 128), M.BlockSlidingWindow(1560, 14), 4),
        ((1, 256, 65536, 16, 4, 64), M.LocalWindow(30000, 30000), 4),
        ((1, 1024, 16384, 12, 12, 128), M.Causal(), 1),  # what all see has splits of its own
        ((1, 4680, 32760, 12, 12, 128), M.BlockSlidingWindow(1560, 7), 1),
        ((2, 1024, 1024, 4, 4, 128), M.LocalWindow(100, 100), 1),
    ],
)
def test_what_is_split_over_keys(sizes: tuple[int, ...], mask: M.Mask, splits: int) -> None:
    call = call_of(sizes, mask)
    lines = Fa4.build(call, CONFIG, H200).lines(call)
    assert (f"in {splits} splits of the keys" in lines.blocks) is (splits > 1)


def test_a_forward_in_splits_takes_a_share_of_its_time() -> None:
    call = call_of((1, 512, 32768, 12, 12, 128), M.LocalWindow(16000, 0))
    found = split_keys_lists.splits_for_call(call, (1, 512, 12, 128), (1, 32768, 12, 128), 132)
    assert found.splits == 5 and 0.4 < found.share < 0.7


def test_what_all_queries_see_is_left_to_splits_of_its_own() -> None:
    call = call_of((1, 1024, 16384, 12, 12, 128), M.Causal())
    found = split_keys_lists.splits_for_call(call, (1, 1024, 12, 128), (1, 16384, 12, 128), 132)
    assert found.splits == 1


def test_splits_that_add_to_the_same_sums_take_no_memory() -> None:
    """Query heads that share keys do; others have dK and dV of each split, in whole tiles."""
    queries, keys = (1, 9000, 4, 20), (1, 130, 2, 20)
    assert split_lists.bytes_of_split(queries, keys) == 0
    assert split_lists.bytes_of_split((*queries[:2], 2, 20), keys) == 4 * 256 * 2 * 24


def test_only_a_band_from_the_first_query_and_key_goes_over_lists() -> None:
    q, k = (jax.ShapeDtypeStruct((2, n, 2, 128), "bfloat16") for n in FEW[1:3])
    inputs: Any = Inputs(q, k, k, mask=M.Causal(0).bind(*FEW[1:3]))  # pyright: ignore[reportArgumentType]
    assert band_lists.backward_pays(inputs, 132)
    for other in (
        inputs.replace(q_offset=64),
        inputs.replace(kv_offset=64),
        inputs.replace(mask=M.Full()),
        inputs.replace(mask=M.KeyLimit(100)),
    ):
        assert not band_lists.backward_pays(other, 132)


# ---- put together --------------------------------------------------------------------------------


def tables(tiles: TilePass, shape: tuple[int, int], by_keys: bool) -> np.ndarray:
    """Go through the lists of a static mask as a kernel does: [splits, T, S]."""
    assert tiles.lists is not None and tiles.test is not None
    lists = TileLists(*map(np.asarray, tiles.lists))
    found = np.zeros((tiles.splits, shape[0] + 256, shape[1] + 256), np.int8)
    counts = np.reshape(lists.work, (tiles.splits, -1))
    for p, row in np.ndindex(*counts.shape):
        at = (p, row) if lists.mixed_count.ndim > 1 else (row,)
        for which, columns in enumerate(named(lists, at)):
            for column in columns:
                place = (column, row) if by_keys else (row, column)
                q, k = (i * n + np.arange(n) for i, n in zip(place, tiles.tile, strict=True))
                passed = which == 1 or tiles.test(0, q[:, None], k[None], (), np)
                found[p][np.ix_(q, k)] += passed
    assert found.sum(axis=0).max() == 1, "no pair is visited twice"
    return found[:, : shape[0], : shape[1]] > 0


def scores(q: Any, k: Any, scale: float) -> Any:
    group = q.shape[2] // k.shape[2]
    return scale * jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, group, 2))


def run_backward(scale: float, seen: list[int], _: Any, given: Any, tiles: TilePass) -> Any:
    """Run a backward in jnp: dq as sums; dk and dv of each split, or sums of heads that share."""
    q, k, v, dout = (x.astype(jnp.float32) for x in given[:4])
    seen.append(tiles.splits)
    heads, group = k.shape[2], q.shape[2] // k.shape[2]

    def of_split(ok: Any) -> Any:
        p = jnp.where(ok, jnp.exp(scores(q, k, scale) - given.lse[..., None]), 0)
        ds = p * (scores(dout, v, 1.0) - given.delta[..., None])
        dq = scale * jnp.einsum("bnts,bsnh->btnh", ds, jnp.repeat(k, group, 2))
        dk, dv = (jnp.einsum("bnts,btnh->bsnh", x, y) for x, y in ((scale * ds, q), (p, dout)))
        return dq, *(x.reshape(*x.shape[:2], heads, group, -1).sum(3) for x in (dk, dv))

    dq, *found = jax.lax.map(of_split, tables(tiles, (q.shape[1], k.shape[1]), by_keys=True))
    if group > 1:
        return dq.sum(0), *(x.sum(0) for x in found)
    return dq.sum(0), *(jnp.concatenate(x).astype(given.k.dtype) for x in found)


def before(_: Any, out: Any, lse: Any, dout: Any) -> Any:
    delta = (dout.astype(jnp.float32) * out).sum(-1).swapaxes(1, 2)
    return lse, delta, jnp.zeros(out.shape)


def run_forward(scale: float, seen: list[int], q: Any, k: Any, v: Any, tiles: TilePass) -> Any:
    """Run a forward in jnp: out and lse of each split, of whole tiles of queries."""
    seen.append(tiles.splits)
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]

    def of_split(ok: Any) -> Any:
        x = jnp.where(ok, scores(q, k, scale), NEG_INF)
        lse = jax.nn.logsumexp(x, axis=-1)
        p = jnp.where(ok, jnp.exp(x - jnp.where(lse == NEG_INF, 0, lse)[..., None]), 0)
        return jnp.einsum("bnts,bsnh->btnh", p, jnp.repeat(v, group, 2)), lse

    outs, lses = jax.lax.map(of_split, tables(tiles, (q.shape[1], k.shape[1]), by_keys=False))
    more, wider = -q.shape[1] % tiles.tile.queries, wide(q.shape[3]) - q.shape[3]
    put = partial(jnp.pad, constant_values=jnp.nan)
    outs = put(outs, ((0, 0), (0, 0), (0, more), (0, 0), (0, wider)))
    return outs, put(lses.swapaxes(2, 3), ((0, 0), (0, 0), (0, more), (0, 0)))


def emulate(monkeypatch: pytest.MonkeyPatch, scale: float) -> list[int]:
    """Put jnp in the place of the launches; return what they are asked for, as it comes."""
    seen: list[int] = []
    cast = lambda _, made, sums, like: sums.astype(like.dtype)  # noqa: E731
    stubs: dict[str, Any] = {
        "_before": before,
        "_run_backward": partial(run_backward, scale, seen),
        "_after": cast,
        "_zeros": lambda made, k: jnp.zeros(k.shape),
        "library": lambda: SimpleNamespace(
            _fa4_bwd_post=None, _fa4_bwd_post_dk=None, _fa4_bwd_post_dv=None
        ),
    }
    for name, stub in stubs.items():
        monkeypatch.setattr(block_sparse, name, stub)
    made = SimpleNamespace(dq=None, dk=None, dv=None)
    monkeypatch.setattr(block_sparse.fa4_launch, "backward_launches", lambda spec: made)
    monkeypatch.setattr(split_keys_lists, "_launched", partial(run_forward, scale, seen))
    monkeypatch.setattr(split_keys_lists, "knows_operands", lambda: True)
    monkeypatch.setattr(fa4_kernel, "knows_rows", lambda: True)
    return seen


def drawn_inputs(sizes: tuple[int, ...], dtype: Any = jnp.bfloat16) -> tuple[np.ndarray, ...]:
    b, t, s, n, kv, h = sizes
    shapes = (b, t, n, h), (b, s, kv, h), (b, s, kv, h), (b, t, n, h)
    return tuple(RNG.normal(size=shape).astype(dtype) for shape in shapes)


BACKWARDS = {
    "causal": ((2, 3000, 200, 2, 2, 64), M.Causal(0)),
    "shared heads": ((1, 3000, 200, 4, 2, 64), M.Causal(0)),
    "window": ((1, 2500, 300, 3, 3, 128), M.LocalWindow(1700, 30, offset=0)),
    "blocks": ((2, 2500, 130, 2, 2, 72), M.BlockCausal(40, 0)),
    "odd head dim": ((1, 2100, 77, 2, 2, 20), M.Causal(0) & M.KeyLimit(60)),
    "long heads": ((1, 2000, 70, 2, 2, 136), M.Causal(-30)),
}


# Each shape once, alone or under vmap, with heads that share keys in both.
MAPPED = [("shared heads", True), ("blocks", False),
          ("odd head dim", False), ("long heads", False)]  # fmt: skip


@pytest.mark.parametrize(("name", "mapped"), but(product(BACKWARDS, (False, True)), MAPPED))
def test_a_backward_in_splits_is_exact(
    name: str, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, mask = BACKWARDS[name]
    call, (q, k, v, dout) = call_of(sizes, mask), drawn_inputs(sizes)
    kernel, seen = Fa4.build(call, CONFIG, H200), emulate(monkeypatch, sizes[-1] ** -0.5)
    ok = np.asarray(call.mask.allowed(np.arange(sizes[1]), np.arange(sizes[2])))
    want = attention64(q, k, v, ok, dout=dout)

    def run(q: Any, k: Any, v: Any, out: Any, lse: Any, dout: Any) -> Any:
        inputs = Inputs(q, k, v, mask=call.mask)
        return kernel.backward(inputs, Rows(out, lse, dout, jnp.zeros_like(lse)))[:3]

    x = q, k, v, want.out.astype(q.dtype), want.lse.astype(np.float32), dout
    if mapped:
        both = jax.jit(jax.vmap(run))(*(np.stack([np.zeros_like(a), a]) for a in x))
        got = [np.asarray(g)[1] for g in both]
    else:
        got = jax.jit(run)(*x)
    assert seen[-1] > 1
    errors = [error(g, w) for g, w in zip(got, (want.dq, want.dk, want.dv), strict=True)]
    assert max(errors) < 2e-2, errors


FORWARDS = {
    "window": ((1, 200, 6000, 2, 2, 128), M.LocalWindow(4000, 5)),
    "blocks": ((2, 260, 5000, 2, 1, 64), M.BlockSlidingWindow(260, 13)),
    "rows empty": ((1, 200, 6000, 2, 2, 40), M.LocalWindow(3000, 9, offset=5990)),
    "video": ((1, 300, 6000, 2, 2, 72), M.LocalWindow(2000, 9, offset=3000)),
}


@pytest.mark.parametrize("name", but(FORWARDS, ["rows empty", "blocks"]))
def test_a_forward_in_splits_is_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, mask = FORWARDS[name]
    call, (q, k, v, _) = call_of(sizes, mask), drawn_inputs(sizes)
    kernel, seen = Fa4.build(call, CONFIG, H200), emulate(monkeypatch, sizes[-1] ** -0.5)
    ok = np.asarray(call.mask.allowed(np.arange(sizes[1]), np.arange(sizes[2])))
    want = attention64(q, k, v, ok)

    def run(q: Any, k: Any, v: Any) -> Any:
        found = kernel.forward(Inputs(q, k, v, mask=call.mask))
        return found.out, found.lse

    out, lse = jax.jit(run)(q, k, v)
    assert seen and seen[-1] > 1
    assert error(out, want.out) < 2e-2 and error(lse, want.lse) < 2e-2
    assert (np.isinf(lse) == np.isinf(want.lse)).all()


@pytest.mark.parametrize("splits", [2, 5])
def test_ids_in_splits_allow_what_the_mask_does(splits: int) -> None:
    """Lists that are made on the device, of each batch row and of all."""
    q, k, _, _ = drawn_inputs((2, 900, 300, 1, 1, 128))
    passes: list[TilePass] = []

    @jax.jit
    def listed(mask: M.Mask) -> Any:
        pairs = mask_inputs.listed(Inputs(jnp.asarray(q), jnp.asarray(k), k, mask=mask)).pairs
        assert pairs is not None
        passes.append(pairs.tiles.backward(pairs, 1.0, splits))
        return passes[-1].lists, padded(passes[-1])

    for batch in (1, 2):
        ids, of_keys = (np.sort(RNG.integers(0, 4, (batch, n)), 1) for n in (900, 300))
        mask = (M.Segments(ids, of_keys) & M.Causal(0)).bind(900, 300)
        lists, arrays = jax.tree.map(np.asarray, listed(mask))
        found, counts = passes[-1], lists.mixed_count
        assert found.test is not None
        assert counts.shape == (splits * batch, 3) and found.rows is None
        table = np.zeros((batch, 900 + 256, 300 + 256), int)
        for at in np.ndindex(*counts.shape):
            for which, columns in enumerate(named(lists, at)):
                for column in columns:
                    q_at, k_at = (
                        i * n + np.arange(n)
                        for i, n in zip((column, at[1]), found.tile, strict=True)
                    )
                    b = at[0] % batch
                    passed = which == 1 or found.test(b, q_at[:, None], k_at[None], arrays, np)
                    table[b][np.ix_(q_at, k_at)] += passed
        want = np.asarray(mask.allowed(np.arange(900), np.arange(300)))[:, 0]
        assert (table[:, :900, :300] == want).all()
