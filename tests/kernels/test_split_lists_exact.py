"""Passes over block-sparse lists in splits give what float64 does: jnp in place of the launches."""

from __future__ import annotations

from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn import masks as M
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.fa4 import block_sparse, mask_inputs, split_keys_lists
from maxattn.kernels.fa4 import kernel as fa4_kernel
from maxattn.kernels.fa4.block_sparse import TilePass, padded
from maxattn.kernels.fa4.block_sparse_lists import TileLists
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fa4.split_keys import wide
from maxattn.kernels.softmax import NEG_INF
from tests.kernels.test_split_lists import CONFIG, H200, call_of, named
from tests.reference import attention64, error
from tests.waiting import but

RNG = np.random.default_rng(4)


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
        "of_sums": cast,
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
