"""The CuTe kernels of norm and rotary embedding: thread by thread on numpy, against float64; what
CuTe's own compiler makes of them, where it is installed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxattn.modules.norm_rope import NormRopeRow, cute
from maxattn.modules.norm_rope.cute_launch import CuteLaunch, fits
from maxattn.modules.norm_rope.cute_threads import CuteThreads
from maxattn.target import Target
from tests.modules.cute_on_numpy import Memory, on_numpy
from tests.modules.test_norm_rope import EPS, error, exact, with_gradients

RNG = np.random.default_rng(11)
H200 = Target.named("NVIDIA H200")
# heads, head dim, norm, style, tokens, length of the tables, vectors: one head's, each head's
CASES: dict[str, tuple[Any, ...]] = {
    "across-interleaved-1536": (12, 128, "across", "interleaved", 7, 7, {"bias": 12, "scale": 12}),
    "across-half-5120": (40, 128, "across", "half", 3, 3, {"bias": 40, "scale": 40}),
    "head-interleaved-shared": (8, 64, "head", "interleaved", 6, 3, {"scale": 1}),
    "head-half-odd_lanes": (5, 72, "head", "half", 6, 2, {"bias": 5, "scale": 1}),
    "across-no_rotary-13_heads": (13, 64, "across", None, 5, 0, {"bias": 13, "scale": 13}),
    "across-40_channels": (16, 40, "across", "interleaved", 5, 5, {"scale": 16}),
    "no_norm-wide": (3, 256, None, "interleaved", 4, 4, {"bias": 3}),
    "one_head-one_warp": (1, 16, "across", "half", 4, 2, {"scale": 1}),
    "nothing_to_add": (2, 96, "head", "half", 3, 3, {}),
}


def drawn(case: tuple[Any, ...], dtype: Any) -> tuple[NormRopeRow, Any, Any, Any]:
    """Return the row, (x, dy), vectors and tables, as the kernels get them."""
    n, h, norm, style, m, length, vectors = case
    rows = [RNG.standard_normal((m, n, h)).astype(dtype) for _ in range(2)]
    held = {name: RNG.standard_normal((heads, h)).astype(dtype) for name, heads in vectors.items()}
    angles = RNG.uniform(0, 6, (length, h // 2))
    tables = [np.cos(angles), np.sin(angles)] if style else []
    return NormRopeRow(n, h, norm, EPS, style), rows, held, [t.astype(np.float32) for t in tables]


def wanted(row: NormRopeRow, rows: Any, held: Any, tables: Any) -> tuple[Any, Any]:
    """Return the result, dx and the gradients of vectors, in float64."""
    x, dy = (a.astype(np.float64)[None] for a in rows)
    repeats = x.shape[1] // len(tables[0]) if tables else 1
    turns = [np.tile(t.astype(np.float64), (repeats, 1))[None] for t in tables]
    shape = (row.heads, row.head_dim)
    vectors = {name: np.broadcast_to(v.astype(np.float64), shape) for name, v in held.items()}
    with jax.enable_x64(True):
        return with_gradients(lambda x, v: exact(row, x, v, turns), (x, vectors), dy)


def run(row: NormRopeRow, rows: Any, held: Any, tables: Any) -> Any:
    """Return y, r, dx and the sums, by the kernels on numpy."""
    x, dy = (Memory(a) for a in rows)
    with H200.assumed():
        ahead, back = (cute.launch_of(row, arrays, rows[0], held) for arrays in (1, 2))
    assert ahead.fits() and back.fits()
    y, dx = (Memory(np.zeros_like(rows[0])) for _ in range(2))
    r = [Memory(np.zeros(len(rows[0]), np.float32))] if row.norm == "across" else []
    blocks = min(back.blocks, len(rows[0]))
    sums = [Memory(np.zeros((blocks, row.heads, row.head_dim), np.float32)) for _ in held]
    vectors, turns = [Memory(v) for v in held.values()], [Memory(t) for t in tables]
    with on_numpy():
        kernels = import_module("maxattn.modules.norm_rope.cute_kernels")
        forward, backward = (
            kind(launch, tuple(held))
            for kind, launch in ((kernels.Forward, ahead), (kernels.Backward, back))
        )
        cute.run_forward(None, forward, x, vectors, turns, y, *r)
        cute.run_backward(None, backward, (dy, x), r, vectors, turns, dx, *sums)
    totals = {name: each.array.sum(0) for name, each in zip(held, sums, strict=True)}
    return y.array, [each.array for each in r], dx.array, totals


@pytest.mark.parametrize("blocks", [2, 1000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_result_and_gradients(
    case: tuple[Any, ...], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Few blocks, so that one has several rows, and not all as many; or one for each row.
    monkeypatch.setattr(CuteLaunch, "blocks", blocks)
    row, rows, held, tables = drawn(case, np.float32)
    y, r, dx, sums = run(row, rows, held, tables)
    want, (want_dx, want_sums) = wanted(row, rows, held, tables)
    assert error(y, want[0]) < 1e-6 and error(dx, want_dx[0]) < 2e-6
    assert all(error(sums[name], want_sums[name]) < 2e-6 for name in held)
    for each in r:
        z = rows[0].astype(np.float64) + held.get("bias", 0.0)
        np.testing.assert_allclose(each, (np.mean(z * z, (1, 2)) + EPS) ** -0.5, rtol=1e-6)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_low_precision_is_rounded_once(dtype: Any) -> None:
    row, rows, held, tables = drawn(CASES["head-half-odd_lanes"], dtype)
    y, _, dx, sums = run(row, rows, held, tables)
    want, (want_dx, want_sums) = wanted(row, rows, held, tables)
    half = 0.5 * float(jnp.finfo(dtype).eps)
    for got, exactly in ((y, want[0]), (dx, want_dx[0])):
        np.testing.assert_allclose(got.astype(np.float64), exactly, rtol=1.01 * half, atol=1e-6)
    assert all(error(sums[name], want_sums[name]) < 2e-6 for name in held)


@pytest.mark.parametrize("blocks", [1, 4, 1000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_queries_and_keys_in_one_launch(
    case: tuple[Any, ...], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CuteLaunch, "blocks", blocks)
    row, rows, held, tables = drawn(case, np.float32)
    vectors = held, {name: RNG.standard_normal(v.shape).astype(v.dtype) for name, v in held.items()}
    found = [Memory(np.zeros_like(x)) for x in rows]
    with H200.assumed():
        launch = cute.launch_of(row, 1, rows[0], held)
    with on_numpy():
        kernels = import_module("maxattn.modules.norm_rope.cute_kernels")
        kernel = kernels.PairForward(launch, tuple(held))
        pairs = [tuple(Memory(each[name]) for each in vectors) for name in held]
        turns = [Memory(t) for t in tables]
        cute.run_pair(None, kernel, [Memory(x) for x in rows], pairs, turns, *found)
    for got, x, own in zip(found, rows, vectors, strict=True):
        want, _ = wanted(row, [x, x], own, tables)
        assert error(got.array, want[0]) < 1e-6


@pytest.mark.parametrize("blocks", [2, 1000])
def test_rows_of_a_longer_sequence(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences of two examples are stored one behind the other, and nowhere else."""
    monkeypatch.setattr(CuteLaunch, "blocks", blocks)
    case = CASES["head-interleaved-shared"]
    both = [drawn((*case[:4], 2 * length, length, *case[6:]), np.float32) for length in (2, 3)]
    row, out = both[0][0], Memory(np.full((2, 6, *case[:2]), np.nan, np.float32))
    for first, (_, (x, _), held, tables) in zip((0, 2), both, strict=True):
        with H200.assumed():
            launch = cute.launch_of(row, 1, x, held)
        with on_numpy():
            kernels = import_module("maxattn.modules.norm_rope.cute_kernels")
            kernel = kernels.Forward(launch, tuple(held), first)
            vectors, turns = [Memory(v) for v in held.values()], [Memory(t) for t in tables]
            cute.run_into(None, kernel, Memory(x), vectors, turns, (), out)
    for first, length, of in zip((0, 2), (2, 3), both, strict=True):
        want = wanted(*of)[0][0].reshape(2, length, *case[:2])
        assert error(out.array[:, first : first + length], want) < 1e-6
    assert np.isnan(out.array[:, 5]).all()


def test_bias_and_scale_that_shared_memory_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CuteLaunch, "holds_vectors", False)
    row, rows, held, tables = drawn(CASES["head-half-odd_lanes"], np.float32)
    _, _, dx, sums = run(row, rows, held, tables)
    _, (want_dx, want_sums) = wanted(row, rows, held, tables)
    assert error(dx, want_dx[0]) < 2e-6
    assert all(error(sums[name], want_sums[name]) < 2e-6 for name in held)


@pytest.mark.parametrize(
    ("heads", "head_dim", "kib"),
    [(12, 128, 99), (40, 128, 163), (64, 128, 163), (128, 72, 0), (3, 20, 0), (2, 512, 0)],
)
def test_which_rows_fit(heads: int, head_dim: int, kib: int) -> None:
    """Of GPUs with 99, 163 and 227 KiB of shared memory an SM, those from `kib` on take them."""
    row = CuteThreads(heads, head_dim, "across", EPS, "interleaved")
    assert [n for n in (99, 163, 227) if fits(row, n * 2**10)] == [
        n for n in (99, 163, 227) if kib and n >= kib
    ]


@pytest.mark.parametrize("arrays", [1, 2])
@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("kib", [99, 227])
def test_blocks_of_an_sm_have_room_together(arrays: int, width: int, kib: int) -> None:
    rows = [(n, h) for n in range(1, 97) for h in (8, 64, 72, 128, 256)]
    for heads, head_dim in rows:
        threads = CuteThreads(heads, head_dim, "across", EPS, "interleaved")
        vectors = 2 * width * heads * head_dim
        launch = CuteLaunch(threads, arrays, width, vectors, 132, kib * 2**10)
        if launch.fits():
            held = vectors if arrays == 2 and launch.holds_vectors else 0
            block = launch.stages * arrays * width * heads * head_dim + held  # at least
            assert launch.stages >= 2 and 1 <= launch.per_sm <= 2048 // threads.threads
            assert launch.per_sm * block <= kib * 2**10 and launch.blocks == 132 * launch.per_sm


def test_every_channel_has_a_thread() -> None:
    rows = [(n, h) for n in range(1, 65) for h in (8, 40, 64, 72, 128, 256)]
    for heads, head_dim in rows:
        threads = CuteThreads(heads, head_dim, "head", EPS, "half")
        assert threads.threads % 32 == 0 and threads.lanes >= threads.used_lanes
        assert threads.slots * (threads.passes - 1) < heads <= threads.slots * threads.passes
        assert threads.passes <= 4 and threads.fits()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of CuTe's own imports
@pytest.mark.skipif(find_spec("cutejax") is None, reason="needs fa4-jax, which brings CuTe")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_compiler_takes_them(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    row, rows, held, tables = drawn(case, ml_dtypes.bfloat16)
    x, dy = map(jnp.asarray, rows)
    _, r = jax.eval_shape(lambda x: cute.forward(row, x, held, tuple(tables), keep=True), x)
    kept = None if r is None else jnp.ones(len(x))
    dx, sums = jax.eval_shape(lambda dy: cute.backward(row, dy, x, kept, held, tuple(tables)), dy)
    assert dx.shape == x.shape and set(sums) == set(held)
