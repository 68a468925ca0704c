"""The row kernel, thread by thread on numpy, and XLA's steps, both against float64.

If CuTe is installed, its own compiler compiles the kernel too.
"""

from __future__ import annotations

from functools import partial
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
from tests.waiting import but

RNG = np.random.default_rng(11)
EPS, H200 = 1e-6, (132, 227 * 2**10)
# Few blocks, so that one takes several rows, and not all as many; or one for each row.
FEW_OR_MANY = (2, 1000)


# ---- cases ---------------------------------------------------------------------------------------


class Case(NamedTuple):
    """The kernel's operation, the number of rows, and the shapes of the vectors' parts."""

    work: RowWork
    b: int
    t: int
    parts: tuple[tuple[int, ...], ...]
    own_tables: bool = False
    branch: Any = None  # dtype of what is added, if not that of the rows

    def launch(self, rows: Any) -> RowLaunch:
        launch = RowLaunch(self.work, tuple(x.dtype.itemsize for x in rows), *H200)
        assert launch.fits()
        return launch


def rotary(
    n: int, h: int, norm: str | None, style: str | None, b: int, t: int, own: bool, **heads: int
) -> Case:
    """Describe norm and rotary embedding with vectors for some heads."""
    named = tuple((name, VectorParts()) for name in heads)
    shapes = tuple((1, 1, 1, k * h) for k in heads.values())
    return Case(RowWork(n, h, norm, EPS, style, named), b, t, shapes, own)


def adaptive(b: int, t: int, d: int, vectors: Any, leading: Any, branch: Any = None) -> Case:
    """Describe the adaptive norm; `leading` has the leading axes of each part of the vectors."""
    work = RowWork(d // 8, 8, "layer", EPS, None, tuple(vectors.items()))
    return Case(work, b, t, tuple((*of, 3, d) for of in leading), branch=branch)


MODULATED = {"scale": VectorParts((1, 1), 1.0), "shift": VectorParts((0, 0))}
GATED = {"gate": VectorParts((2, 2)), **MODULATED}
LEARNED, BIAS = {"scale": VectorParts(), "shift": VectorParts()}, {"bias": VectorParts()}
OTHER_FRAMES = ((2, 4), (1, 1), *((2, 1), (1, 1)) * 2)
CASES: dict[str, Case] = {
    "across-interleaved": rotary(12, 128, "across", "interleaved", 1, 7, False, bias=12, scale=12),
    "across-half-5120": rotary(40, 128, "across", "half", 1, 3, False, bias=40, scale=40),
    "head-interleaved-shared": rotary(8, 64, "head", "interleaved", 2, 3, False, scale=1),
    "head-half-odd_lanes": rotary(5, 72, "head", "half", 2, 3, True, bias=5, scale=1),
    "across-no_rotary-13_heads": rotary(13, 64, "across", None, 1, 5, False, bias=13, scale=13),
    "across-40_channels": rotary(16, 40, "across", "interleaved", 1, 5, False, scale=16),
    "no_norm-wide": rotary(3, 256, None, "interleaved", 2, 2, True, bias=3),
    "one_head-one_warp": rotary(1, 16, "across", "half", 2, 2, False, scale=1),
    "nothing_to_add": rotary(2, 96, "head", "half", 1, 3, False),
    "modulated": adaptive(1, 12, 512, MODULATED, ((1, 3), (1, 1)) * 2),
    "gated": adaptive(2, 6, 512, GATED, ((2, 3), (1, 1)) * 3),
    "gate and norm of other frames": adaptive(2, 8, 1024, GATED, OTHER_FRAMES),
    "one vector for a batch": adaptive(3, 4, 256, GATED, ((1, 2), (1, 1)) * 3),
    "each token its own": adaptive(1, 5, 512, GATED, ((1, 5), (1, 1)) * 3),
    "learned, no modulation": adaptive(1, 7, 768, LEARNED, ((1, 1),) * 2),
    "bias of the branch": adaptive(1, 9, 3072, BIAS | GATED, ((1, 1),) * 7),
    "no vectors": adaptive(2, 3, 128, {}, ()),
    "left-over threads": adaptive(1, 6, 1152, GATED, ((1, 3), (1, 1)) * 3),
    "fewer octets than a warp": adaptive(1, 4, 40, MODULATED, ((1, 2), (1, 1)) * 2),
    "one pass, left-over threads": adaptive(1, 4, 328, MODULATED, ((1, 2), (1, 1)) * 2),
    "three passes": adaptive(1, 3, 9216, MODULATED, ((1, 1), (1, 1)) * 2),
    "a wide branch": adaptive(1, 6, 512, GATED, ((1, 3), (1, 1)) * 3, np.float32),
}  # fmt: skip


class Drawn(NamedTuple):
    rows: tuple[Any, ...]
    parts: tuple[Any, ...]
    tables: tuple[Any, ...]


def drawn(case: Case, dtype: Any, mean: float = 0.0) -> Drawn:
    work, size = case.work, (case.b, case.t, case.work.channels)
    kinds = (dtype, case.branch or dtype)[: 1 + ("gate" in dict(work.vectors))]
    rows = tuple((RNG.standard_normal(size) + mean).astype(kind) for kind in kinds)
    wide = (RNG.standard_normal(shape).astype(np.float32) for shape in case.parts)
    parts = tuple(part.astype(dtype) if i % 3 == 2 else part for i, part in enumerate(wide))
    lines = (case.b if case.own_tables else 1) * case.t
    angles = RNG.uniform(0, 6, (lines, work.head_dim // 2))
    functions = (np.cos, np.sin) if work.style else ()
    return Drawn(rows, parts, tuple(f(angles).astype(np.float32) for f in functions))


def exact(case: Case, of: Drawn, total: Any) -> list[Any]:
    """Return y and, with a branch, the sum in float64; a rounded `total` is normed if given."""
    work, left, vectors = case.work, iter(of.parts), {}
    for name, vector in work.vectors:
        each = [next(left)[:, :, row].astype(np.float64) for row in vector.rows]
        whole: Any = sum(np.repeat(v, case.t // v.shape[1], axis=1) for v in each) + vector.constant
        vectors[name] = np.tile(whole, work.channels // whole.shape[2])
    *before, x = (a.astype(np.float64) for a in of.rows)
    z = (x + vectors.get("bias", 0.0)) * vectors.get("gate", 1.0) + sum(before)
    results = [z] if before else []
    z = (total.astype(np.float64) if before else z).reshape(case.b, case.t, work.heads, -1)
    axes = 3 if work.norm == "head" else (2, 3)
    if work.norm == "layer":
        z = z - z.mean(axes, keepdims=True)
    if work.norm:
        z = z / np.sqrt(np.mean(z * z, axes, keepdims=True) + EPS)
    z = z.reshape(x.shape) * vectors.get("scale", 1.0) + vectors.get("shift", 0.0)
    if work.style:
        cos, sin = (t.astype(np.float64).reshape(-1, case.t, 1, t.shape[1]) for t in of.tables)
        last = work.style == "interleaved"
        shape = (-1, 2) if last else (2, work.head_dim // 2)
        pairs = z.reshape(case.b, case.t, work.heads, *shape)
        first, second = np.moveaxis(pairs, 4 if last else 3, 0)
        turned = (first + 1j * second) * (cos + 1j * sin)
        z = np.stack((turned.real, turned.imag), -1 if last else 3)
    return [z.reshape(x.shape), *results]


def run(case: Case, of: Drawn) -> list[Any]:
    """Return y and, with a branch, the sum, from the kernel on numpy."""
    results = [Memory(np.zeros_like(of.rows[0])) for _ in of.rows]
    operands = (list(map(Memory, each)) for each in of)
    with on_numpy():
        kernel = import_module("maxattn.modules.row_kernel.kernel")
        kernel.run(None, case.launch(of.rows), *operands, *results)
    return [each.array for each in results]


def by_xla(case: Case, of: Drawn) -> Any:
    work = case.work
    if work.norm == "layer":
        return jax.jit(partial(adaptive_steps, work))(of.rows, of.parts)
    names = (name for name, _ in work.vectors)
    vectors = {n: v.reshape(-1, work.head_dim) for n, v in zip(names, of.parts, strict=True)}
    tables = tuple(a.reshape(-1, case.t, a.shape[1]) for a in of.tables)
    heads = of.rows[0].reshape(case.b, case.t, work.heads, -1)
    steps = jax.jit(partial(in_steps, work))
    return [steps(heads, vectors, tables).reshape(of.rows[0].shape)]


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", but(CASES, list(CASES)[::2]))
def test_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    of = drawn(case, np.float32)
    steps = by_xla(case, of)
    for blocks in FEW_OR_MANY:
        monkeypatch.setattr(RowLaunch, "blocks", blocks)
        found = run(case, of)
        for got, xla, want in zip(found, steps, exact(case, of, found[-1]), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-6, atol=4e-6)
            np.testing.assert_allclose(xla, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["modulated", "left-over threads"])
def test_a_large_mean_costs_no_digits(norm: str) -> None:
    """The variance uses distances from the mean; at a mean of 1,000 float32 squares lose it."""
    t, d = CASES[norm].t, CASES[norm].work.channels
    case = adaptive(1, t, d, MODULATED, ((1, 3), (1, 1)) * 2)
    of = drawn(case, np.float32, 1e3)
    (got,), (want,) = run(case, of), exact(case, of, None)
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["head-half-odd_lanes", "gated"])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_low_precision_is_rounded_once(name: str, dtype: Any) -> None:
    case, half = CASES[name], 0.5 * float(jnp.finfo(dtype).eps)
    of = drawn(case, dtype)
    found = run(case, of)
    for got, want, steps in zip(found, exact(case, of, found[-1]), (1.01, 2.02), strict=False):
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float64), want, rtol=steps * half, atol=1e-5)


# ---- threads and launches ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "head_dim", "width", "kib"),
    [(96, 128, 2, 99), (96, 128, 4, 163), (128, 72, 2, 0), (3, 20, 2, 0), (2, 512, 2, 0)],
)
def test_which_rows_fit(heads: int, head_dim: int, width: int, kib: int) -> None:
    """SMs have 99, 163 or 227 KiB of shared memory; those with at least `kib` fit the rows."""
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


@pytest.mark.skipif(find_spec("cutejax") is None, reason="needs fa4-jax, which brings CuTe")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of CuTe's own imports
@pytest.mark.parametrize("name", CASES)
def test_the_compiler_takes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    case = CASES[name]
    rows, parts, tables = drawn(case, ml_dtypes.bfloat16)
    launch = case.launch(rows)
    found = jax.eval_shape(lambda *rows: call.norm_rows(launch, rows, parts, tables), *rows)
    assert [(y.shape, y.dtype) for y in found] == [(rows[0].shape, rows[0].dtype)] * len(rows)
