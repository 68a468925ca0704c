"""The row kernel: thread by thread on numpy, against float64; what CuTe's own compiler makes of it,
where it is installed.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from maxattn.modules.adaptive_layer_norm import in_steps as adaptive_steps
from maxattn.modules.norm_rope import in_steps
from maxattn.modules.row_kernel import call
from maxattn.modules.row_kernel.work import RowLaunch, RowWork, VectorParts
from tests.modules.row_kernel.cute_on_numpy import Memory, on_numpy

RNG = np.random.default_rng(11)
EPS, H200 = 1e-6, (132, 227 * 2**10)
# Few blocks, so that one takes several rows, and not all as many; or one for each row.
FEW_OR_MANY = (2, 1000)


def error(got: Any, want: Any) -> float:
    want = np.asarray(want, np.float64)
    return float(np.max(np.abs(np.asarray(got, np.float64) - want)) / np.max(np.abs(want)))


def launch_of(work: RowWork, *rows: Any) -> RowLaunch:
    launch = RowLaunch(work, tuple(x.dtype.itemsize for x in rows), *H200)
    assert launch.fits()
    return launch


# ---- norm and rotary embedding -------------------------------------------------------------------

# heads, head dim, norm, style, batch, tokens, tables of each example, heads of the vectors
CASES: dict[str, tuple[Any, ...]] = {
    "across-interleaved-1536": (
        12, 128, "across", "interleaved", 1, 7, False, {"bias": 12, "scale": 12}
    ),
    "across-half-5120": (40, 128, "across", "half", 1, 3, False, {"bias": 40, "scale": 40}),
    "head-interleaved-shared": (8, 64, "head", "interleaved", 2, 3, False, {"scale": 1}),
    "head-half-odd_lanes": (5, 72, "head", "half", 2, 3, True, {"bias": 5, "scale": 1}),
    "across-no_rotary-13_heads": (13, 64, "across", None, 1, 5, False, {"bias": 13, "scale": 13}),
    "across-40_channels": (16, 40, "across", "interleaved", 1, 5, False, {"scale": 16}),
    "no_norm-wide": (3, 256, None, "interleaved", 2, 2, True, {"bias": 3}),
    "one_head-one_warp": (1, 16, "across", "half", 2, 2, False, {"scale": 1}),
    "nothing_to_add": (2, 96, "head", "half", 1, 3, False, {}),
}  # fmt: skip


class Drawn(NamedTuple):
    work: RowWork
    x: Any
    vectors: dict[str, Any]
    tables: tuple[Any, ...]

    @property
    def parts(self) -> list[Any]:
        return [v.reshape(1, 1, 1, -1) for v in self.vectors.values()]

    @property
    def lines(self) -> list[Any]:
        return [t.reshape(-1, t.shape[-1]) for t in self.tables]

    @property
    def heads(self) -> Any:
        return self.x.reshape(*self.x.shape[:2], self.work.heads, self.work.head_dim)


def drawn(case: tuple[Any, ...], dtype: Any) -> Drawn:
    n, h, norm, style, b, t, own, heads = case
    x = RNG.standard_normal((b, t, n * h)).astype(dtype)
    vectors = {name: RNG.standard_normal((k, h)).astype(dtype) for name, k in heads.items()}
    angles = RNG.uniform(0, 6, (b if own else 1, t, h // 2))
    tables = tuple(f(angles).astype(np.float32) for f in (np.cos, np.sin)) if style else ()
    named = tuple((name, VectorParts()) for name in vectors)
    return Drawn(RowWork(n, h, norm, EPS, style, named), x, vectors, tables)


def exact(of: Drawn) -> Any:
    """Norm, and turn pairs as complex numbers, in float64."""
    x, vectors, tables = jax.tree.map(
        lambda a: a.astype(np.float64), (of.heads, of.vectors, of.tables)
    )
    z = x + vectors.get("bias", 0.0)
    if of.work.norm:
        axes = (2, 3) if of.work.norm == "across" else 3
        z = z / np.sqrt(np.mean(z * z, axes, keepdims=True) + of.work.eps)
    z = z * vectors.get("scale", 1.0)
    if not of.work.style:
        return z.reshape(of.x.shape)
    last = of.work.style == "interleaved"
    shape = (-1, 2) if last else (2, x.shape[-1] // 2)
    first, second = np.moveaxis(z.reshape(*z.shape[:3], *shape), 4 if last else 3, 0)
    turned = (first + 1j * second) * (tables[0] + 1j * tables[1])[:, :, None]
    return np.stack((turned.real, turned.imag), -1 if last else 3).reshape(of.x.shape)


def run(of: Drawn) -> Any:
    """Return y by the kernel on numpy."""
    y = Memory(np.zeros_like(of.x))
    operands = (Memory(of.x),), list(map(Memory, of.parts)), list(map(Memory, of.lines))
    with on_numpy():
        kernel = import_module("maxattn.modules.row_kernel.kernel")
        kernel.run(None, launch_of(of.work, of.x), *operands, y)
    return y.array


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_norm_and_rotary(case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    of = drawn(case, np.float32)
    want = exact(of)
    steps = in_steps(of.work, of.heads, of.vectors, of.tables)
    assert error(steps.reshape(of.x.shape), want) < 1e-6
    for blocks in FEW_OR_MANY:
        monkeypatch.setattr(RowLaunch, "blocks", blocks)
        assert error(run(of), want) < 1e-6


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_low_precision_is_rounded_once(dtype: Any) -> None:
    of = drawn(CASES["head-half-odd_lanes"], dtype)
    half = 0.5 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(run(of).astype(np.float64), exact(of), rtol=1.01 * half, atol=1e-6)


# ---- the adaptive norm ---------------------------------------------------------------------------

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

    @property
    def work(self) -> RowWork:
        return RowWork(self.d // 8, 8, "layer", EPS, None, tuple(self.vectors.items()))


ADAPTIVE = {
    "modulated": Case(1, 12, 512, MODULATED, ((1, 3), (1, 1)) * 2),
    "gated": Case(2, 6, 512, GATED, ((2, 3), (1, 1)) * 3),
    "gate and norm of other frames": Case(
        2, 8, 1024, GATED, ((2, 4), (1, 1), *((2, 1), (1, 1)) * 2)
    ),
    "one vector for a batch": Case(3, 4, 256, GATED, ((1, 2), (1, 1)) * 3),
    "each token its own": Case(1, 5, 512, GATED, ((1, 5), (1, 1)) * 3),
    "learned, no modulation": Case(
        1, 7, 768, {"scale": VectorParts(), "shift": VectorParts()}, ((1, 1),) * 2
    ),
    "bias of the branch": Case(
        1, 9, 3072, {"bias": VectorParts(), **GATED}, ((1, 1), *((1, 1), (1, 1)) * 3)
    ),
    "no vectors": Case(2, 3, 128, {}, ()),
    "left-over threads": Case(1, 6, 1152, GATED, ((1, 3), (1, 1)) * 3),
    "fewer octets than a warp": Case(1, 4, 40, MODULATED, ((1, 2), (1, 1)) * 2),
    "one pass, left-over threads": Case(1, 4, 328, MODULATED, ((1, 2), (1, 1)) * 2),
    "three passes": Case(1, 3, 9216, MODULATED, ((1, 1), (1, 1)) * 2),
    "a wide branch": Case(1, 6, 512, GATED, ((1, 3), (1, 1)) * 3, np.float32),
}  # fmt: skip


def rows_and_parts(case: Case, dtype: Any, mean: float = 0.0) -> tuple[list[Any], list[Any]]:
    kinds = [dtype, case.width or dtype][: 1 + ("gate" in case.vectors)]
    rows = [(RNG.standard_normal((case.b, case.t, case.d)) + mean).astype(k) for k in kinds]
    parts = [RNG.standard_normal((*of, 3, case.d)).astype(np.float32) for of in case.leading]
    return rows, [part.astype(dtype) if i % 3 == 2 else part for i, part in enumerate(parts)]


def adapted(case: Case, rows: list[Any], parts: list[Any]) -> list[Any]:
    """Return the normed rows and, after a branch, the sums, by the kernel on numpy."""
    results = [Memory(np.zeros_like(rows[0])) for _ in rows]
    with on_numpy():
        kernel = import_module("maxattn.modules.row_kernel.kernel")
        operands = [Memory(x) for x in rows], [Memory(v) for v in parts], []
        kernel.run(None, launch_of(case.work, *rows), *operands, *results)
    return [each.array for each in results]


def adapted_exactly(case: Case, rows: list[Any], parts: list[Any], total: Any) -> tuple[Any, Any]:
    """Return the normed rows, and the sums, in float64; a `total` that was rounded is normed."""
    left, vectors = iter(parts), {}
    for name, of in case.vectors.items():
        each = [next(left)[:, :, row].astype(np.float64) for row in of.rows]
        spread = [np.repeat(v, case.t // v.shape[1], axis=1) for v in each]
        vectors[name] = sum(spread) + of.constant
    x, *branch = (a.astype(np.float64) for a in rows)
    for y in branch:
        x = x + vectors.get("gate", 1.0) * (y + vectors.get("bias", 0.0))
    before = total.astype(np.float64) if branch else x
    z = before - before.mean(-1, keepdims=True)
    n = z / np.sqrt((z * z).mean(-1, keepdims=True) + EPS)
    return n * vectors.get("scale", 1.0) + vectors.get("shift", 0.0), x


@pytest.mark.parametrize("case", ADAPTIVE.values(), ids=ADAPTIVE)
def test_adaptive_norm(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, parts = rows_and_parts(case, np.float32)
    steps = adaptive_steps(case.work, tuple(map(jnp.asarray, rows)), tuple(parts))
    for blocks in FEW_OR_MANY:
        monkeypatch.setattr(RowLaunch, "blocks", blocks)
        found = adapted(case, rows, parts)
        exactly = adapted_exactly(case, rows, parts, found[-1])
        for got, by_xla, want in zip(found, steps, exactly, strict=False):
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=4e-6)
            np.testing.assert_allclose(by_xla, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["modulated", "left-over threads"])
def test_a_large_mean_costs_no_digits(name: str) -> None:
    """The variance is that of distances from the mean: 1,000 away, float32 squares lose it."""
    case = ADAPTIVE[name]._replace(vectors=MODULATED, leading=ADAPTIVE["modulated"].leading)
    rows, parts = rows_and_parts(case, np.float32, 1e3)
    (got,), (want, _) = adapted(case, rows, parts), adapted_exactly(case, rows, parts, None)
    np.testing.assert_allclose(got, want, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_adaptive_norm_is_rounded_once(dtype: Any) -> None:
    case = ADAPTIVE["gated"]
    rows, parts = rows_and_parts(case, dtype)
    half = 0.5 * float(jnp.finfo(dtype).eps)
    found = adapted(case, rows, parts)
    normed, total = adapted_exactly(case, rows, parts, found[1])
    np.testing.assert_allclose(found[0].astype(np.float64), normed, rtol=1.01 * half, atol=1e-5)
    np.testing.assert_allclose(found[1].astype(np.float64), total, rtol=2.02 * half, atol=1e-6)


# ---- threads and launches ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "head_dim", "width", "kib"),
    [(96, 128, 2, 99), (96, 128, 4, 163), (128, 72, 2, 0), (3, 20, 2, 0), (2, 512, 2, 0)],
)
def test_which_rows_fit(heads: int, head_dim: int, width: int, kib: int) -> None:
    """Of GPUs with 99, 163 and 227 KiB of shared memory an SM, those from `kib` on take them."""
    work = RowWork(heads, head_dim, "across", EPS, "interleaved", (("scale", VectorParts()),))
    fitting = [n for n in (99, 163, 227) if RowLaunch(work, (width,), 132, n * 2**10).fits()]
    assert fitting == [n for n in (99, 163, 227) if kib and n >= kib]


@pytest.mark.parametrize("widths", [(2,), (4, 4), (2, 4)])
def test_blocks_of_an_sm_have_room_together(widths: tuple[int, ...]) -> None:
    rows = product((1, 2, 3, 5, 12, 13, 24, 40, 65, 96), (8, 40, 64, 72, 128, 256))
    sizes = [*rows, *((d // 8, 8) for d in (8, 136, 320, 1152, 3072, 5120, 9216, 12_288))]
    for (heads, head_dim), kib in product(sizes, (99, 227)):
        work = RowWork(heads, head_dim, "across", EPS, "half", (("scale", VectorParts()),))
        launch = RowLaunch(work, widths, 132, kib * 2**10)
        if not launch.fits():
            continue
        assert work.threads % 32 == 0 and work.lanes >= work.used_lanes and work.passes <= 4
        assert work.slots * (work.passes - 1) < heads <= work.slots * work.passes
        assert sum(map(work.of_warp, range(work.warps))) == work.channels
        block = launch.stages * sum(widths) * work.channels  # at least
        assert launch.stages >= 2 and launch.per_sm * block <= kib * 2**10
        assert launch.per_sm * work.threads <= 2048 and launch.blocks == 132 * launch.per_sm


# ---- the compiler --------------------------------------------------------------------------------

needs_cute = pytest.mark.skipif(
    find_spec("cutejax") is None, reason="needs fa4-jax, which brings CuTe"
)


@needs_cute
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of CuTe's own imports
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_compiler_takes_norm_and_rotary(
    case: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    of = drawn(case, ml_dtypes.bfloat16)
    launch, parts, tables = launch_of(of.work, of.x), tuple(of.parts), tuple(of.lines)
    (y,) = jax.eval_shape(lambda x: call.norm_rows(launch, (x,), parts, tables), of.x)
    assert (y.shape, y.dtype) == (of.x.shape, of.x.dtype)


@needs_cute
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("case", ADAPTIVE.values(), ids=ADAPTIVE)
def test_the_compiler_takes_the_adaptive_norm(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    rows, parts = rows_and_parts(case, ml_dtypes.bfloat16)
    launch = launch_of(case.work, *rows)
    found = jax.eval_shape(lambda *rows: call.norm_rows(launch, rows, tuple(parts)), *rows)
    assert [(y.shape, y.dtype) for y in found] == [(rows[0].shape, rows[0].dtype)] * len(rows)
