"""Every way in which maxattn launches FlashAttention-4 on a Hopper GPU, against float64.

The reference runs on the GPU too, because launches differ only at large lengths.
`test_the_cases_cover_every_way` needs no GPU: it looks at the launches themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.fa4.kernel import HopperFa4
from maxattn.kernels.fa4.launch import Launch, backward_launch, forward_launch
from maxattn.kernels.fa4.problem import Problem, of_call
from maxattn.kernels.fa4.work import ALL
from maxattn.kernels.kv_block import KeyRange, pack
from tests.cases import TOLERANCE
from tests.gpu.requirements import skip_unless_available
from tests.kernels.shards import by_shards
from tests.reference import error

RNG = np.random.default_rng(11)
NAMES = "out", "lse", "dq", "dk", "dv"


class Case(NamedTuple):
    """B, T, S, N, K, H, a mask, the dtype, and the shape of a bias."""

    sizes: tuple[int, ...]
    mask: M.Mask = M.Full()
    dtype: str = "bfloat16"
    bias: tuple[int, ...] = ()

    @property
    def bound(self) -> M.Mask:
        b, t, s, n, *_ = self.sizes
        return self.mask.bind(t, s, b, n)

    @property
    def call(self) -> ma.Call:
        shape = self.bias or None
        return ma.Call(*self.sizes, self.dtype, self.bound, shape, bias_dtype="float32")


def ids(batch: int, t: int, s: int, most: int = 3) -> M.Mask:
    return M.Segments(*(np.sort(RNG.integers(0, most, (batch, n)), 1) for n in (t, s)))


def lengths(*ends: int) -> M.Mask:
    return M.KeyPadding(np.array(ends, np.int32))


def flags(batch: int, s: int) -> M.Mask:
    return M.KeyPadding(RNG.integers(0, 4, (batch, s)) > 0)


SHARED = 2, 900, 1100, 8, 2, 128
CASES: dict[str, Case] = {
    # All pairs: tiles that the lengths do not fill, cuts, the queue, few keys.
    **{f"head dim {h}": Case((2, 517, 645, 3, 3, h)) for h in (40, 64, 72, 96, 104, 128)},
    **{f"head dim {h}": Case((1, 333, 402, 4, 2, h)) for h in (136, 160, 192, 200, 256)},
    "one query": Case((2, 1, 900, 4, 4, 64)),
    "one key": Case((2, 900, 1, 4, 4, 64)),
    "float16": Case((2, 700, 1300, 4, 4, 128), dtype="float16"),
    "shared heads": Case(SHARED),
    "the last wave": Case((1, 3300, 3300, 7, 7, 128)),
    "the last wave, 64": Case((3, 2600, 2048, 10, 10, 64)),
    "few queries": Case((1, 780, 20000, 4, 4, 128)),
    "few queries, shared": Case((1, 390, 20000, 8, 2, 128)),
    "few keys": Case((2, 20000, 130, 3, 3, 64)),
    "few keys, shared": Case((2, 20000, 200, 4, 2, 128)),
    "first writes": Case((2, 8190, 512, 12, 12, 128)),
    "first writes, 64": Case((4, 4096, 77, 10, 10, 64), dtype="float16"),
    "queue": Case((4, 2048, 77, 20, 20, 64)),
    "queue, 128": Case((2, 4680, 512, 12, 12, 128)),
    "many blocks": Case((16, 1024, 1024, 20, 20, 64)),
    # Lengths and flags of keys.
    "lengths": Case((3, 500, 700, 4, 4, 128), lengths(1, 700, 350)),
    "lengths, none": Case((3, 500, 700, 4, 4, 128), lengths(0, 700, 129)),
    "lengths, shared heads": Case((2, 500, 700, 8, 2, 64), lengths(65, 640)),
    "lengths, first writes": Case((2, 8190, 512, 12, 12, 128), lengths(60, 512)),
    "lengths, few queries": Case((2, 300, 9000, 4, 4, 128), lengths(8000, 100)),
    "lengths, head dim 256": Case((2, 500, 700, 4, 4, 256), lengths(65, 640)),
    "flags": Case((2, 500, 700, 4, 4, 128), flags(2, 700)),
    # Masks of positions: ranges and explicit lists, cut or not, taken from the queue or not.
    "causal": Case((2, 1500, 1500, 4, 4, 128), M.Causal()),
    "causal, 64": Case((2, 1500, 1500, 4, 4, 64), M.Causal()),
    "causal, shared heads": Case((1, 2000, 2000, 8, 2, 128), M.Causal()),
    "causal, head dim 256": Case((1, 1000, 1000, 4, 4, 256), M.Causal()),
    "causal, many blocks": Case((8, 2048, 2048, 16, 16, 128), M.Causal()),
    "causal beside a cache": Case((1, 520, 9000, 4, 4, 128), M.Causal()),
    "causal, few keys": Case((2, 5000, 257, 4, 2, 128), M.Causal(0)),
    "causal, before the keys": Case((1, 4000, 200, 3, 3, 64), M.Causal(-1000)),
    "window": Case((1, 3000, 3000, 4, 4, 128), M.LocalWindow(700, 9)),
    "window that few see": Case((1, 5000, 300, 2, 1, 96), M.LocalWindow(2500, 9, offset=0)),
    "cached window": Case((2, 300, 9000, 4, 2, 256), M.LocalWindow(6000, 9)),
    "block window": Case((1, 3900, 3900, 4, 4, 128), M.BlockSlidingWindow(390, 3)),
    "blocks": Case((2, 1560, 1560, 4, 4, 72), M.BlockCausal(390)),
    "video": Case((1, 3000, 3000, 4, 4, 64), M.VideoMask(10, 300, frames_per_block=3)),
    "teacher forcing": Case((1, 4800, 4800, 2, 2, 128), M.TeacherForcing(8, 300, 2)),
    "three intervals": Case((1, 2000, 2000, 4, 4, 64), M.LocalWindow(9, 9) | M.KeyLimit(99)),
    "known segments": Case((1, 4096, 4096, 4, 4, 128), M.Segments.of_lengths((900, 2000, 1196))),
    # Lists that are made on the device.
    "segments": Case((2, 2000, 2000, 4, 4, 128), ids(2, 2000, 2000)),
    "segments, shared by batch rows": Case((2, 2000, 2000, 4, 2, 64), ids(1, 2000, 2000)),
    "segments, many blocks": Case((4, 2048, 2048, 12, 12, 128), ids(4, 2048, 2048, 9)),
    "segments, few keys": Case((2, 6000, 300, 4, 2, 128), ids(2, 6000, 300)),
    "segments, head dim 256": Case((2, 900, 900, 2, 2, 256), ids(2, 900, 900)),
    "causal and segments": Case((2, 2000, 2000, 4, 2, 128), M.Causal() & ids(2, 2000, 2000)),
    "causal and lengths": Case((2, 900, 900, 4, 4, 128), M.Causal() & lengths(60, 800)),
    "window and flags": Case((2, 900, 900, 4, 4, 64), M.LocalWindow(99, 9) & flags(2, 900)),
    # A bias, with every mask written into it.
    "bias": Case((2, 500, 700, 4, 4, 64), bias=(2, 4, 500, 700)),
    "bias of a head, causal": Case((2, 640, 640, 4, 2, 128), M.Causal(), bias=(1, 4, 640, 640)),
}
WAYS: dict[str, Callable[[Problem, Launch, Launch], Any]] = {
    "forward: all items cut": lambda p, f, b: not p.has_lists and f.cut.tail == ALL,
    "forward: the last items cut": lambda p, f, b: not p.has_lists and f.cut.tail > 0,
    "forward: lists cut": lambda p, f, b: p.has_lists and f.cut.splits > 1,
    "forward: queue": lambda p, f, b: f.queue and not p.has_lists,
    "forward: queue of lists": lambda p, f, b: f.queue and p.has_lists,
    "forward: groups of lanes": lambda p, f, b: p.has_lists and f.group < p.lanes,
    "forward: lengths cut": lambda p, f, b: p.kind == "lengths" and f.cut.tail,
    "forward: 64 queries": lambda p, f, b: f.tile.queries == 64,
    "forward: 192 queries": lambda p, f, b: f.tile.queries == 192,
    "backward: all items cut": lambda p, f, b: not p.has_lists and b.cut.tail == ALL,
    "backward: the last items cut": lambda p, f, b: not p.has_lists and b.cut.tail > 0,
    "backward: cut, shared heads": lambda p, f, b: b.cut.tail and p.heads > p.kv_heads,
    "backward: lists cut": lambda p, f, b: p.has_lists and b.cut.splits > 1,
    "backward: groups of lanes": lambda p, f, b: p.has_lists and b.group < p.lanes,
    "backward: first writes": lambda p, f, b: b.writes_first and p.kind == "dense",
    "backward: first writes, lengths": lambda p, f, b: b.writes_first and p.kind == "lengths",
    "backward: 64 queries": lambda p, f, b: b.tile.queries == 64 and p.head_dim == 128,
}


def test_the_cases_cover_every_way() -> None:
    ways = dict.fromkeys(WAYS, "")
    for name, case in CASES.items():
        problem = of_call(case.call, 132)
        launches = forward_launch(problem), backward_launch(problem)
        ways |= {way: name for way, covers in WAYS.items() if covers(problem, *launches)}
    assert all(ways.values()), [way for way, name in ways.items() if not name]


# ---- the reference -------------------------------------------------------------------------------


def exact(x: dict[str, Any], allowed: Any, scale: float) -> dict[str, np.ndarray]:
    """Return the results in float64, computed head by head and batch row by batch row."""
    group = x["q"].shape[2] // x["k"].shape[2]
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(y, np.float64)) for name, y in x.items()}
        heads = {n: y.swapaxes(1, 2) if n != "dlse" else y for n, y in wide.items() if n != "bias"}
        heads |= {n: jnp.repeat(heads[n], group, axis=1) for n in ("k", "v")}
        b, n, t, s = *heads["q"].shape[:3], heads["k"].shape[2]
        pairs = np.broadcast_to(np.asarray(allowed), (b, n, t, s))
        bias = wide.get("bias", jnp.zeros((1, 1, 1, 1)))
        bias = jnp.broadcast_to(
            bias, (*np.broadcast_shapes(bias.shape[:2], (b, n)), *bias.shape[2:])
        )
        found = [
            _one_head({k: y[i, j] for k, y in heads.items()}, pairs[i, j], bias[i, j], scale)
            for i in range(b)
            for j in range(n)
        ]
        out, lse, dq, dk, dv = (
            np.stack([np.asarray(one[at]) for one in found]).reshape(b, n, *found[0][at].shape)
            for at in range(5)
        )
    dk, dv = (y.reshape(b, n // group, group, s, -1).sum(2) for y in (dk, dv))
    tokens = (y.swapaxes(1, 2) for y in (dq, dk, dv))
    return dict(zip(NAMES, (out.swapaxes(1, 2), lse, *tokens), strict=True))


@partial(jax.jit, static_argnums=3)
def _one_head(x: dict[str, Any], pairs: Any, bias: Any, scale: float) -> tuple[Any, ...]:
    scores = jnp.where(pairs, scale * x["q"] @ x["k"].T + bias, -jnp.inf)
    some = pairs.any(-1)
    lse = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - jnp.where(some, lse, 0.0)[:, None])
    dp = x["dout"] @ x["v"].T
    delta = (p * dp).sum(-1, keepdims=True)
    ds = scale * p * (dp - delta + x["dlse"][:, None])
    return p @ x["v"], lse, ds @ x["k"], ds.T @ x["q"], p.T @ x["dout"]


def drawn(case: Case, allowed: np.ndarray) -> dict[str, Any]:
    b, t, s, n, kv, h = case.sizes
    rng = np.random.default_rng(5)
    shapes = {"q": (b, t, n, h), "k": (b, s, kv, h), "v": (b, s, kv, h), "dout": (b, t, n, h)}
    x = {name: jnp.asarray(rng.normal(size=shape), case.dtype) for name, shape in shapes.items()}
    dlse = rng.normal(size=(b, n, t)) * allowed.any(-1)
    x["dlse"] = jnp.asarray(dlse, jnp.float32)
    return x | ({"bias": jnp.asarray(rng.normal(size=case.bias), "float32")} if case.bias else {})


def compare(got: Any, want: dict[str, np.ndarray], dtype: str = "bfloat16") -> None:
    errors = {
        name: error(np.asarray(x, np.float32), want[name])
        for name, x in zip(NAMES, got, strict=True)
        if x is not None
    }
    assert max(errors.values()) < TOLERANCE[dtype], errors


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("name", CASES)
def test_against_float64(name: str, with_lse: bool) -> None:
    skip_unless_available("flash")
    case = CASES[name]
    b, t, s, n, _, h = case.sizes
    mask = jax.tree.map(jnp.asarray, case.bound)
    allowed = np.asarray(case.bound.allowed(np.arange(t), np.arange(s)))
    x = drawn(case, allowed)
    config = ma.AttentionConfig(attention="flash", cross_attention="flash")

    @jax.jit
    def both(x: dict[str, Any], mask: M.Mask) -> Any:
        run = partial(
            ma.attention, mask=mask, bias=x.get("bias"), config=config, return_lse=with_lse
        )
        found, pull = jax.vjp(run, x["q"], x["k"], x["v"])
        cotangent = (x["dout"], x["dlse"]) if with_lse else x["dout"]
        return *(found if with_lse else (found, None)), *pull(cotangent)

    got = both(x, mask)
    given = x if with_lse else x | {"dlse": jnp.zeros_like(x["dlse"])}
    compare(got, exact(given, allowed, h**-0.5), case.dtype)
    hidden = np.broadcast_to(~allowed.any(-1), (b, n, t))
    for unseen in (got[0], got[2]):  # out and dq
        assert (np.asarray(unseen, np.float32).swapaxes(1, 2)[hidden] == 0).all()


SHARDS = {  # a mask, and the tokens of a shard
    "causal": (M.Causal(), 512),
    "window": (M.LocalWindow(700, 100), 512),
    "blocks": (M.BlockCausal(128), 512),
    "segments": (ids(2, 1536, 1536), 1536),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHARDS)
def test_shards_whose_positions_are_traced(name: str) -> None:
    """Results over shards of keys, each with its own offset, merge to the whole."""
    skip_unless_available("flash")
    (mask, size), b, t, n, h = SHARDS[name], 2, 1536, 4, 128
    case = Case((b, t, t, n, n, h), mask)
    allowed = np.asarray(case.bound.allowed(np.arange(t), np.arange(t)))
    x = drawn(case, allowed) | {"dlse": jnp.zeros((b, n, t))}
    sharded = ma.Call(*case.sizes, "bfloat16", case.bound, return_lse=True, sharded=True)
    kernel = HopperFa4.build(sharded, ma.AttentionConfig(attention="flash"), ma.Target.here())
    bound = jax.tree.map(jnp.asarray, case.bound)
    got = by_shards(kernel, bound, x, size)
    compare(got, exact(x, allowed, h**-0.5))


@pytest.mark.gpu
@pytest.mark.parametrize("h", [64, 128])
def test_blocks_of_a_ring_add_up_in_place(h: int) -> None:
    """Two blocks of keys, one of them in two ranges, accumulate into one dQ."""
    skip_unless_available("flash")
    case = Case((2, 1200, 2048, 4, 4, h))
    b, t, s, n, *_ = case.sizes
    allowed = np.ones((1, 1, t, s), bool)
    x = drawn(case, allowed) | {"dlse": jnp.zeros((b, n, t))}
    want = exact(x, allowed, h**-0.5)
    call = ma.Call(b, t, s // 2, n, n, h, "bfloat16")
    kernel = HopperFa4.build(call, ma.AttentionConfig(attention="flash"), ma.Target.here())
    halves = [(x["k"][:, at : at + s // 2], x["v"][:, at : at + s // 2]) for at in (0, s // 2)]
    lse = jnp.asarray(want["lse"], jnp.float32)
    rows = Rows(jnp.asarray(want["out"], x["q"].dtype), lse, x["dout"], jnp.zeros_like(lse))

    @jax.jit
    def added(q: Any, halves: Any, rows: Rows) -> Any:
        sums = kernel.accumulator(Inputs(q, *halves[0]), rows)
        first, second = (pack(*half) for half in halves)
        begun = sums.add(first, KeyRange(0, 512))
        grads = sums.add(first, KeyRange(512, None), begun), sums.add(second)
        return sums.dq(), grads

    dq, grads = added(x["q"], halves, rows)
    dk, dv = (jnp.concatenate([g[i] for g in grads], axis=1) for i in (0, 1))
    compare((want["out"], want["lse"], dq, dk, dv), want)
