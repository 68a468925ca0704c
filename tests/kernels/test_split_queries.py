"""A backward that leaves SMs idle is split over queries."""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.devices import device_of
from maxattn.kernels.base import Grads, Inputs, Rows
from maxattn.kernels.fa4 import backward_steps, primitives, split_queries
from maxattn.kernels.fa4.kernel import Fa4
from maxattn.kernels.fa4.launch_order import START
from maxattn.kernels.fa4.split_queries import (
    LAUNCH,
    SUMS,
    BackwardWork,
    SplitTail,
    tail_for,
    tail_of,
)
from maxattn.kernels.fa4.tile_sizes import narrow_tile, whole_tile
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.masks.band_pieces import Piece
from tests.reference import Answer, attention64, error

H200 = ma.Target("gpu", "NVIDIA H200", (("fa4-jax", "0.1.0"),))


def ends(rows: list[int], sms: int) -> int:
    """Return when the last row ends, if each processor takes the next one as soon as it is free."""
    free = [0] * sms
    for row in rows:
        heapq.heapreplace(free, free[0] + row)
    return max(free)


def played(tail: SplitTail | None, tiles: int, rows: int, steps: int, sms: int) -> int:
    """Return when a backward ends, thread block by thread block: whole ones, then splits."""
    whole = ends([steps + START] * ((tiles - (tail.tiles if tail else 0)) * rows), sms)
    if tail is None:
        return whole
    starts = [n * steps // tail.splits for n in range(tail.splits + 1)]
    splits = [b - a for a, b in pairwise(starts)]
    assert min(splits) > 0 and sum(splits) == steps, "every split has queries"
    each = [split + START for split in splits for _ in range(tail.tiles * rows)]
    return whole + ends(each, sms) + SUMS + (LAUNCH if whole else 0)


@pytest.mark.parametrize("sms", [132, 78])
def test_splits_end_sooner(sms: int) -> None:
    rng, gains = np.random.default_rng(0), 0
    for _ in range(300):
        tiles, rows, steps = (int(rng.integers(1, most)) for most in (60, 170, 450))
        tail = tail_of(BackwardWork(tiles, rows, steps, sms))
        before, now = (played(x, tiles, rows, steps, sms) for x in (None, tail))
        assert now <= (0.99 * before if tail else before)
        gains += tail is not None
    assert 50 < gains < 250


@pytest.mark.parametrize(
    "sizes, tail",
    [
        ((256, 12, 410), SplitTail(3, 11)),  # 253 tiles of 12 heads are 23.0 waves of 132
        ((4, 12, 410), SplitTail(4, 11)),  # a text: 48 rows, for 132 SMs
        ((33, 40, 410), None),  # ten whole waves
        ((1, 160, 32), SplitTail(1, 4)),
        ((1, 12, 1), None),  # one tile of queries cannot be split
        ((1, 1, 2), None),  # too short: sums over splits would take longer
    ],
)
def test_what_is_split(sizes: tuple[int, int, int], tail: SplitTail | None) -> None:
    assert tail_of(BackwardWork(*sizes)) == tail


def test_the_chosen_tail_is_the_best() -> None:
    for sizes in ((256, 12, 410), (36, 48, 58), (64, 40, 103), (5, 30, 90)):
        ways = [
            SplitTail(n, p)
            for n in range(1, min(sizes[0], 24) + 1)
            for p in range(2, min(16, sizes[2]) + 1)
        ]
        best = min(played(x, *sizes, 132) for x in ways)
        assert played(tail_of(BackwardWork(*sizes)), *sizes, 132) <= 1.01 * best


def test_only_heads_of_their_own_keys_are_split() -> None:
    q, k = (1, 32760, 12, 128), (1, 512, 12, 128)
    assert tail_for(q, k) == SplitTail(4, 11)
    assert tail_for(q, (1, 512, 4, 128)) is None, "query heads that share keys add dK up in float32"
    assert tail_for((*q[:3], 160), (*k[:3], 160)) == SplitTail(6, 11)
    assert tail_for((*q[:3], 100), (*k[:3], 100)) is None
    assert tail_for((1, 64015, 1, 128), (1, 77, 1, 128)) == SplitTail(1, 115), "else SMs wait"
    assert tail_for((2, 4608, 24, 128), (2, 4608, 24, 128)) == SplitTail(3, 5)
    assert (
        tail_for((16, 4096, 10, 64), (16, 77, 10, 64))
        == SplitTail(1, 4)
        != tail_for((1, 4096, 10, 64), (1, 77, 10, 64))
    )


def test_other_hopper_gpus_have_other_numbers_of_sms() -> None:
    kinds = (
        "NVIDIA H200",
        "NVIDIA H100 80GB HBM3",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 PCIe",
        "NVIDIA H20",
    )
    assert [device_of(kind).sms for kind in kinds] == [132, 132, 132, 114, 78]
    q, k = (1, 32760, 12, 128), (1, 512, 12, 128)
    assert tail_for(q, k, 78) != tail_for(q, k)


class Launches:
    """Make the launches of a backward in jnp; what they do not write is NaN."""

    def __init__(self, scale, q, k):
        self.scale, self.tile = scale, whole_tile(q.shape[3])

    def first(self, out, dout, lse):
        delta = (dout * out.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
        return delta, lse, jnp.zeros(out.shape, jnp.float32)

    def split(self, given, start, splits):
        q, k, v, dout, lse, delta, dq, _ = given
        whole, steps, found = [], -(-q.shape[1] // self.tile.queries), []
        if start:
            add, *grads = self._grads(q, k[:, :start], v[:, :start], dout, lse, delta)
            dq, empty = dq + add, jnp.full(k.shape, jnp.nan)
            whole = [empty.at[:, :start].set(x).astype(k.dtype) for x in grads]
        for n in range(splits):
            i, j = (p * steps // splits * self.tile.queries for p in (n, n + 1))
            assert i < min(j, q.shape[1]), "every split has queries"
            stats = lse[:, :, i:j], delta[:, :, i:j]
            add, *grads = self._grads(q[:, i:j], k[:, start:], v[:, start:], dout[:, i:j], *stats)
            dq, found = dq.at[:, i:j].add(add), [*found, grads]
        last = (jnp.concatenate([x[i] for x in found]).astype(k.dtype) for i in (0, 1))
        return [dq, *whole, *last]

    def last(self, dq, q):
        return (self.scale * dq).astype(q.dtype)

    def _grads(self, q, k, v, dout, lse, delta):
        q, k, v, dout = (x.astype(jnp.float32) for x in (q, k, v, dout))
        p = jnp.exp(self.scale * jnp.einsum("btnh,bsnh->bnts", q, k) - lse[..., None])
        ds = p * (jnp.einsum("btnh,bsnh->bnts", dout, v) - delta[..., None])
        dk, dv = (jnp.einsum("bnts,btnh->bsnh", *pair) for pair in ((ds, q), (p, dout)))
        return jnp.einsum("bnts,bsnh->btnh", ds, k), self.scale * dk, dv


SIZES = [(1, 700, 530, 12, 128), (2, 300, 400, 13, 64), (3, 700, 77, 5, 64), (2, 900, 257, 7, 8)]


@cache
def in_float64(sizes: tuple) -> tuple[tuple[jax.Array, ...], Answer]:
    """Make operands in bfloat16, and what they give in float64."""
    (b, t, s, n, h), rng = sizes, np.random.default_rng(0)
    q, k, v, dout = (jnp.asarray(rng.normal(size=(b, x, n, h)), "bfloat16") for x in (t, s, s, t))
    return (q, k, v, dout), attention64(q, k, v, dout=dout)


def mapped_or_not() -> list[Any]:
    """Map the sizes whose heads are few; all, and the largest, in `make test-all`."""
    alone = [pytest.param(False, s, marks=() if i else pytest.mark.slow)
             for i, s in enumerate(SIZES)]  # fmt: skip
    marks = [pytest.mark.slow] * 2 + [()] * 2
    return alone + [pytest.param(True, s, marks=m) for s, m in zip(SIZES, marks, strict=True)]


@pytest.mark.parametrize(
    ("mapped", "sizes"),
    mapped_or_not(),
    ids=lambda x: str(x) if isinstance(x, bool) else "x".join(map(str, x)),
)
def test_splits_of_a_backward_are_put_together(
    sizes: tuple, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (q, k, v, dout), want = in_float64(sizes)
    whole, tail = [], tail_for(q.shape, k.shape) or SplitTail(1, 2)

    def rows(x, scale):
        whole.append(x)
        return split_queries._in_splits(x, scale, SplitTail(1, 1))

    stubs = {"takes_splits": lambda *_: True, "tail_for": lambda *_: tail, "_whole": rows}
    for name, stub in stubs.items():
        monkeypatch.setattr(split_queries, name, stub)
    monkeypatch.setattr(backward_steps, "Launches", Launches)
    monkeypatch.setattr(backward_steps, "library_has_launches", lambda: True)
    x = q, k, v, jnp.asarray(want.out, "bfloat16"), jnp.asarray(want.lse, jnp.float32), dout

    def run(q, k, v, out, lse, dout):
        rows = Rows(out, lse, dout, jnp.zeros_like(lse))
        return split_queries.backward(PieceInputs.whole(q, k, v, None), rows, sizes[-1] ** -0.5)[:3]

    if mapped:
        several = (a if a is k else jnp.stack([jnp.zeros_like(a), a]) for a in x)
        got = [g[1] for g in jax.jit(jax.vmap(run, (0, None, 0, 0, 0, 0)))(*several)]
    else:
        got = jax.jit(run)(*x)
    assert len(whole) == mapped, "several at once are whole rows of one launch"
    assert all(error(g, w) < 2e-2 for g, w in zip(got, (want.dq, want.dk, want.dv), strict=True))


@pytest.mark.parametrize("launched", [True, False])
def test_only_kernels_that_maxattn_launches_are_split(
    launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def split(inputs, rows, scale, sms):
        asked.append(sms)
        return Grads(inputs.q, inputs.k, inputs.v)

    def plain(inputs, rows, window, scale, launched):
        return Grads(inputs.q, inputs.k, inputs.v)

    monkeypatch.setattr(split_queries, "backward", split)
    monkeypatch.setattr(primitives, "fa4_backward", plain)
    kernel, x = (
        Fa4(1.0, launched=launched, sms=78),
        jnp.zeros((1, 5000, 12, 128), "bfloat16"),
    )
    stats, whole = jnp.zeros((1, 12, 5000)), PieceInputs.whole(x, x, x, None)
    causal = replace(whole, piece=Piece(0, 5000, 0, 5000, None, 0))
    for inputs in (whole, causal):
        kernel.piece_backward(inputs, Rows(x, stats, x, stats))
    assert asked == ([78] if launched else [])


@pytest.mark.parametrize("mask", [ma.masks.Full(), ma.masks.Causal()])
@pytest.mark.parametrize("lse_gradient", [False, True])
def test_nothing_is_computed_beside_the_launches_where_all_rows_see_a_key(
    mask: ma.masks.Mask, lse_gradient: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short backward waits for every launch: a pass over the LSE is one more."""
    found = lambda inputs, *_: Grads(inputs.q, inputs.k, inputs.v)  # noqa: E731
    monkeypatch.setattr(split_queries, "backward", found)
    monkeypatch.setattr(primitives, "fa4_backward", found)
    monkeypatch.setattr(Fa4, "_of_lse", lambda *_: (0.0, 0.0))
    kernel = Fa4(1.0, lse_gradient, launched=True)

    def run(x: jax.Array, lse: jax.Array) -> Any:
        inputs = Inputs(x, x, x, mask=mask.bind(256, 256))
        return kernel.backward(inputs, Rows(x, lse, x, lse))[:3]

    text = str(jax.make_jaxpr(run)(jnp.zeros((4, 256, 2, 64), "bfloat16"), jnp.zeros((4, 2, 256))))
    assert ("select" in text) is lse_gradient


def test_few_queries_are_never_split() -> None:
    """They take tiles of their own instead: `tile_sizes.narrow_tile`."""
    few = [t for t in range(1, 700) if narrow_tile(128, t)]
    shapes = [(t, n, s) for t in few[::9] for n in (4, 84, 1320) for s in (77, 900, 9000)]
    assert not any(tail_for((1, t, n, 128), (1, s, n, 128), 132) for t, n, s in shapes)
