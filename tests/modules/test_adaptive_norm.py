"""The adaptive norm by XLA's steps against float64, and on meshes with a stand-in for the kernel.

Refusals: golden/modules.txt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.errors import InputError
from maxattn.jax_private.mesh import auto_mesh
from maxattn.modules import GatedBranch, ModulationRow, adaptive_norm, gated_sum
from maxattn.modules.adaptive_layer_norm import decide, in_steps
from maxattn.modules.row_kernel import call
from maxattn.modules.row_kernel.work import RowWork
from tests.golden_text import check_refused

RNG = np.random.default_rng(9)
EPS, D = 1e-3, 24
H200 = ma.Target.named("NVIDIA H200", (("jax", jax.__version__), ("fa4-jax", "0.1.0")))


def drawn(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(RNG.standard_normal(shape), dtype)


def norm(learned: bool = False) -> nnx.LayerNorm:
    made = nnx.LayerNorm(D, epsilon=EPS, use_bias=learned, use_scale=learned, rngs=nnx.Rngs(0))
    for p in (made.scale, made.bias):
        if p is not None:
            p.set_value(drawn(D))
    return made


def row(frames: int, number: int, batch: int = 2, base: bool = True) -> ModulationRow:
    learned = drawn(1, 1, 3, D) if base else None
    return ModulationRow(drawn(batch, frames, 3, D), number, learned)


def spread(of: ModulationRow | None, tokens: int, without: float = 0.0) -> Any:
    """Broadcast a modulation row to all tokens, in float64."""
    if of is None:
        return without
    found: Any = sum(np.asarray(part, np.float64)[:, :, of.row] for part in of.parts)
    return np.repeat(found, tokens // found.shape[1], axis=1)


def wanted(
    x: Any, of: nnx.LayerNorm, scale: Any, shift: Any, branch: GatedBranch | None
) -> tuple[Any, Any]:
    """Return the sum and its norm in float64."""
    total, t = np.asarray(x, np.float64), x.shape[1]
    if branch is not None:
        bias = 0.0 if branch.bias is None else np.asarray(branch.bias, np.float64)
        total = total + spread(branch.gate, t, 1.0) * (np.asarray(branch.y, np.float64) + bias)
    z = total - total.mean(-1, keepdims=True)
    n = z / np.sqrt((z * z).mean(-1, keepdims=True) + EPS)
    if of.scale is not None and of.bias is not None:
        n = n * np.asarray(of.scale[...], np.float64) + np.asarray(of.bias[...], np.float64)
    return total, n * (1 + spread(scale, t)) + spread(shift, t)


CASES: dict[str, tuple[Any, ...]] = {
    "a modulation": (False, row(1, 1), row(1, 0), None),
    "a time for each token": (False, row(12, 1), row(12, 0), None),
    "one for a batch, no table": (False, row(3, 1, 1), row(3, 0, base=False), None),
    "a branch": (False, row(3, 1), row(3, 0), GatedBranch(drawn(2, 12, D), row(4, 2))),
    "a branch with a bias": (
        False, row(1, 1), row(1, 0), GatedBranch(drawn(2, 12, D), row(1, 2), drawn(D))
    ),
    "a branch without a gate": (False, row(1, 1), None, GatedBranch(drawn(2, 12, D))),
    "learned": (True, None, None, GatedBranch(drawn(2, 12, D), row(3, 2))),
    "learned and modulated": (True, row(3, 1), row(3, 0), None),
    "a norm alone": (False, None, None, None),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float64(case: tuple[Any, ...]) -> None:
    learned, scale, shift, branch = case
    x, of = drawn(2, 12, D) + 3, norm(learned)
    total, n = nnx.jit(adaptive_norm)(x, of, scale, shift, branch=branch)
    want_total, want = wanted(x, of, scale, shift, branch)
    np.testing.assert_allclose(total, want_total, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(n, want, rtol=1e-5, atol=1e-5)
    if branch is not None:
        np.testing.assert_array_equal(gated_sum(x, branch), total)


def test_low_precision_is_rounded_where_it_is_returned() -> None:
    x, branch = drawn(2, 12, D, dtype=jnp.bfloat16), GatedBranch(drawn(2, 12, D), row(3, 2))
    total, n = adaptive_norm(x, norm(), row(3, 1), None, branch=branch)
    assert total.dtype == n.dtype == jnp.bfloat16
    want, _ = wanted(x, norm(), None, None, branch)
    np.testing.assert_allclose(np.asarray(total, np.float64), want, rtol=2**-8)


# ---- the kernel, with a stand-in -----------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to run on an H200, and record the shapes of the kernel's calls."""
    runs: list[tuple[int, ...]] = []

    def norm_rows(launch: Any, rows: Any, parts: Any, name: str) -> Any:
        runs.append(rows[0].shape)
        return list(in_steps(launch.work, rows, parts))

    monkeypatch.setattr(call, "norm_rows", norm_rows)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with H200.assumed():
        yield runs


def modulated(x: Any, y: Any, table: Any, frames: Any, mesh: Any = None) -> Any:
    rows = [ModulationRow(table, n, frames) for n in range(3)]
    branch = GatedBranch(y, rows[2])
    return adaptive_norm(x, norm(), rows[1], rows[0], branch=branch, mesh=mesh)


def with_gradient(mesh: Any, *of: Any) -> Any:
    """Return outputs, and gradients of x, the branch, the table and learned parameters."""

    @jax.jit
    def run(*of: Any) -> Any:
        out, pull = jax.vjp(lambda *of: modulated(*of, mesh), *of)
        return out, pull(jax.tree.map(jnp.ones_like, out))

    return run(*of)


@pytest.mark.parametrize(
    ("axes", "frames"), [({"fsdp": 2}, 3), ({"fsdp": 2, "context": 2}, 1), ({"context": 2}, 3)]
)
def test_each_device_takes_its_own(kernel: Any, axes: dict[str, int], frames: int) -> None:
    sizes = tuple(axes.values())
    mesh = auto_mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), tuple(axes))
    x, y = (drawn(2, 12, D, dtype=jnp.bfloat16) for _ in range(2))
    of = x, y, drawn(2, frames, 3, D), drawn(1, 1, 3, D)
    with ma.Target.named("cpu").assumed():
        want, back = with_gradient(None, *of)
    got = jax.jit(lambda *of: modulated(*of, mesh))(*of)
    spans = axes.get("context", 1)
    # Frames that a device has in part are left to XLA.
    local = (2 // axes.get("fsdp", 1), 12 // spans, D)
    assert set(kernel) == ({local} if spans == 1 or frames == 1 else set())
    kernel.clear()
    got_back = with_gradient(mesh, *of)[1]
    assert kernel == [], "a gradient needs XLA's steps"
    for limit, mine, theirs in ((2**-7, got, want), (2e-2, got_back, back)):
        for a, b in zip(mine, theirs, strict=True):
            a, b = (np.asarray(each, np.float64) for each in (a, b))
            np.testing.assert_allclose(a, b, rtol=limit, atol=limit if limit > 0.01 else 1e-5)


@pytest.mark.parametrize(
    ("frames", "tokens", "dtype", "runs"),
    [
        ((1, 1), 12, "float16", 1),
        ((4, 1), 12, "bfloat16", 1),
        ((1, 4), 12, "bfloat16", 1),
        ((4, 2), 12, "bfloat16", 0),
        ((1, 1), 12, "float32", 0),
        ((1, 1), 0, "bfloat16", 0),
    ],
)
def test_what_is_left_to_xla(
    kernel: Any, frames: tuple[int, int], tokens: int, dtype: str, runs: int
) -> None:
    """XLA computes vectors with two numbers of frames, float32, and inputs without tokens."""
    x, (of_norm, of_gate) = drawn(2, tokens, D, dtype=dtype), frames
    branch = GatedBranch(x, row(of_gate, 2))
    run = partial(adaptive_norm, branch=branch)
    total, n = nnx.eval_shape(run, x, norm(), row(of_norm, 1))
    assert total.shape == n.shape == x.shape and len(kernel) == runs


def test_elsewhere_no_kernel_runs() -> None:
    x, work = jnp.zeros((1, 2, D), jnp.bfloat16), RowWork(D // 8, 8, "layer", EPS)
    for name in ("cpu", "TPU v6e", "NVIDIA A100", "NVIDIA B200", "NVIDIA H100"):
        assert decide(ma.Target.named(name), work, (x,), (), None) is None


# ---- refusals ------------------------------------------------------------------------------------

BAD: dict[str, Callable[[Any], Any]] = {
    "width": lambda x: adaptive_norm(x, norm(), ModulationRow(jnp.zeros((2, 1, 3, 8)))),
    "frames": lambda x: adaptive_norm(x, norm(), row(5, 1)),
    "batch": lambda x: adaptive_norm(x, norm(), row(3, 1, 3)),
    "branch": lambda x: adaptive_norm(x, norm(), branch=GatedBranch(x[:, :3])),
    "branch_of_one_row": lambda x: gated_sum(x, GatedBranch(x[:1])),
    "frames_of_a_gate": lambda x: gated_sum(x, GatedBranch(x, row(5, 1))),
    "row_beyond": lambda x: adaptive_norm(x, norm(), row(3, 3)),
    "row_from_the_end": lambda x: adaptive_norm(x, norm(), branch=GatedBranch(x, row(3, -1))),
    "row_of_a_smaller_base": lambda x: ModulationRow(
        drawn(2, 1, 6, D), 4, drawn(1, 1, 3, D)
    ).value(),
    "row_of_three_axes": lambda x: adaptive_norm(x, norm(), ModulationRow(drawn(2, 3, D), 1)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    check_refused(f"modules/adaptive_norm_{name}", InputError, lambda: BAD[name](drawn(2, 12, D)))
