"""The CuTe kernel of the adaptive norm: thread by thread on numpy, against float64; what CuTe's own
compiler makes of it, where it is installed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxattn.modules.adaptive_layer_norm import cute
from maxattn.modules.adaptive_layer_norm.threads import NormLaunch, NormThreads
from maxattn.modules.adaptive_layer_norm.vectors import VectorParts
from maxattn.target import Target
from tests.modules.cute_on_numpy import Memory, on_numpy

RNG = np.random.default_rng(5)
EPS = 1e-6
H200 = Target.named("NVIDIA H200")
MODULATED = {"scale": VectorParts((1, 1), 1.0), "shift": VectorParts((0, 0))}
GATED = {"gate": VectorParts((2, 2)), **MODULATED}


class Case(NamedTuple):
    """Hold sizes, and the vectors with the leading axes of each of their parts."""

    b: int
    t: int
    d: int
    vectors: dict[str, VectorParts]
    leading: tuple[tuple[int, int], ...]
    width: Any = None  # dtype of the branch


CASES = {
    "modulated": Case(1, 12, 512, MODULATED, ((1, 3), (1, 1)) * 2),
    "gated": Case(2, 6, 512, GATED, ((2, 3), (1, 1)) * 3),
    "gate and norm of other frames": Case(
        2, 8, 1024, GATED, ((2, 4), (1, 1), *((2, 1), (1, 1)) * 2)
    ),
    "one vector for a batch": Case(3, 4, 256, GATED, ((1, 2), (1, 1)) * 3),
    "each token its own": Case(1, 5, 512, GATED, ((1, 5), (1, 1)) * 3),
    "learned, no modulation": Case(
        1, 7, 768, {"scale": VectorParts((0,)), "shift": VectorParts((0,))}, ((1, 1),) * 2
    ),
    "bias of the branch": Case(
        1, 9, 3072, {"bias": VectorParts((0,)), **GATED}, ((1, 1), *((1, 1), (1, 1)) * 3)
    ),
    "no vectors": Case(2, 3, 128, {}, ()),
    "left-over threads": Case(1, 6, 1152, GATED, ((1, 3), (1, 1)) * 3),
    "fewer octets than a warp": Case(1, 4, 40, MODULATED, ((1, 2), (1, 1)) * 2),
    "one pass, left-over threads": Case(1, 4, 328, MODULATED, ((1, 2), (1, 1)) * 2),
    "three passes": Case(1, 3, 9216, MODULATED, ((1, 1), (1, 1)) * 2),
    "a wide branch": Case(1, 6, 512, GATED, ((1, 3), (1, 1)) * 3, np.float32),
}  # fmt: skip


def drawn(case: Case, dtype: Any, mean: float = 0.0) -> tuple[list[Any], list[Any]]:
    """Return the rows, and the parts of the vectors."""
    kinds = [dtype, case.width or dtype][: 1 + ("gate" in case.vectors)]
    rows = [(RNG.standard_normal((case.b, case.t, case.d)) + mean).astype(k) for k in kinds]
    parts = [RNG.standard_normal((*of, 3, case.d)).astype(np.float32) for of in case.leading]
    return rows, [part.astype(dtype) if i % 3 == 2 else part for i, part in enumerate(parts)]


def wanted(case: Case, rows: list[Any], parts: list[Any], rounded: Any) -> tuple[Any, Any]:
    """Return the normed rows, and the sums, in float64; those are `rounded` before the norm."""
    left, vectors = iter(parts), {}
    for name, of in case.vectors.items():
        each = [next(left)[:, :, row].astype(np.float64) for row in of.rows]
        spread = [np.repeat(v, case.t // v.shape[1], axis=1) for v in each]
        vectors[name] = sum(spread) + of.constant
    x, *branch = (a.astype(np.float64) for a in rows)
    for y in branch:
        x = x + vectors.get("gate", 1.0) * (y + vectors.get("bias", 0.0))
    before = rounded.astype(np.float64) if branch else x
    z = before - before.mean(-1, keepdims=True)
    n = z / np.sqrt((z * z).mean(-1, keepdims=True) + EPS)
    return n * vectors.get("scale", 1.0) + vectors.get("shift", 0.0), x


def run(case: Case, rows: list[Any], parts: list[Any]) -> list[Any]:
    """Return the normed rows and, after a branch, the sums, by the kernel on numpy."""
    with H200.assumed():
        launch = cute.launch_of(EPS, tuple(rows), tuple(case.vectors.items()))
    assert launch.fits()
    results = [Memory(np.zeros_like(rows[0])) for _ in rows]
    with on_numpy():
        kernels = import_module("maxattn.modules.adaptive_layer_norm.cute_kernels")
        kernel = kernels.AdaptiveNorm(launch)
        cute.run(None, kernel, [Memory(a) for a in rows], [Memory(a) for a in parts], *results)
    return [each.array for each in results]


@pytest.mark.parametrize("blocks", [2, 5, 1000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case: Case, blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Few blocks, whose rows are of several frames; or one for each row.
    monkeypatch.setattr(NormLaunch, "blocks", blocks)
    rows, parts = drawn(case, np.float32)
    found = run(case, rows, parts)
    want = wanted(case, rows, parts, found[-1])
    for got, exact in zip(found, want, strict=False):
        np.testing.assert_allclose(got, exact, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("case", [CASES["modulated"], CASES["left-over threads"]])
def test_a_large_mean_costs_no_digits(case: Case) -> None:
    """The variance is that of distances from the mean: 1,000 away, float32 squares lose it."""
    case = case._replace(vectors=MODULATED, leading=CASES["modulated"].leading)
    rows, parts = drawn(case, np.float32, 1e3)
    (got,), (exact, _) = run(case, rows, parts), wanted(case, rows, parts, None)
    np.testing.assert_allclose(got, exact, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_low_precision_is_rounded_once(dtype: Any) -> None:
    case = CASES["gated"]
    rows, parts = drawn(case, dtype)
    half = 0.5 * float(jnp.finfo(dtype).eps)
    found = run(case, rows, parts)
    normed, total = wanted(case, rows, parts, found[1])
    np.testing.assert_allclose(found[0].astype(np.float64), normed, rtol=1.01 * half, atol=1e-5)
    np.testing.assert_allclose(found[1].astype(np.float64), total, rtol=2.02 * half, atol=1e-6)


def test_every_channel_has_a_thread() -> None:
    for channels in range(8, 12_288, 8):
        threads = NormThreads(channels)
        if threads.fits():
            assert threads.threads % 32 == 0 and 32 <= threads.threads <= 384
            whole = threads.threads * (threads.passes - 1)
            assert whole < threads.octets <= threads.threads * threads.passes
            assert sum(map(threads.of_warp, range(threads.warps))) == channels


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("kib", [99, 227])
def test_blocks_of_an_sm_have_room_together(width: int, kib: int) -> None:
    for channels in range(128, 8192, 128):
        vectors = tuple(GATED.items())
        launch = NormLaunch(NormThreads(channels), EPS, vectors, (2, width), 132, kib * 2**10)
        if launch.fits():
            block = 3 * channels * (2 + width)  # at least
            assert launch.per_sm * block <= kib * 2**10 and launch.blocks == 132 * launch.per_sm
            assert launch.per_sm * launch.threads.threads <= 2048


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of CuTe's own imports
@pytest.mark.skipif(find_spec("cutejax") is None, reason="needs fa4-jax, which brings CuTe")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_compiler_takes_it(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    rows, parts = (tuple(map(jnp.asarray, each)) for each in drawn(case, ml_dtypes.bfloat16))
    launch = cute.launch_of(EPS, rows, tuple(case.vectors.items()))
    found = jax.eval_shape(lambda rows, parts: cute.forward(launch, rows, parts), rows, parts)
    assert [each.shape for each in found] == [rows[0].shape] * len(rows)
