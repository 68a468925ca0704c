"""The adaptive norm by XLA's steps, against float64; over meshes with a kernel in their place; what
it refuses: golden/modules.txt.
"""

from __future__ import annotations

from collections.abc import Callable
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
from tests.golden_text import check_golden

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


def exact(value: Any) -> Any:
    return None if value is None else np.asarray(value, np.float64)


def spread(of: ModulationRow | None, tokens: int) -> Any:
    """Return a row for each token, in float64."""
    if of is None:
        return 0.0
    found: Any = sum(exact(part)[:, :, of.row] for part in of.parts)
    return np.repeat(found, tokens // found.shape[1], axis=1)


def wanted(
    x: Any, of: nnx.LayerNorm, scale: Any, shift: Any, branch: GatedBranch | None
) -> tuple[Any, Any]:
    """Return the sum and its norm in float64."""
    total = exact(x)
    if branch is not None:
        gate = 1.0 if branch.gate is None else spread(branch.gate, x.shape[1])
        total = total + gate * (
            exact(branch.y) + (0 if branch.bias is None else exact(branch.bias))
        )
    z = total - total.mean(-1, keepdims=True)
    n = z / np.sqrt((z * z).mean(-1, keepdims=True) + EPS)
    if of.scale is not None and of.bias is not None:
        n = n * exact(of.scale.get_value()) + exact(of.bias.get_value())
    return total, n * (1 + spread(scale, x.shape[1])) + spread(shift, x.shape[1])


CASES: dict[str, tuple[Any, ...]] = {
    "a modulation": (False, row(1, 1), row(1, 0), None),
    "a time for each frame": (False, row(3, 1), row(3, 0), None),
    "a time for each token": (False, row(12, 1), row(12, 0), None),
    "one for a batch": (False, row(3, 1, 1), row(3, 0, 1), None),
    "no table": (False, row(3, 1, base=False), row(3, 0, base=False), None),
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
    total, n = adaptive_norm(x, of, scale, shift, branch=branch)
    want_total, want = wanted(x, of, scale, shift, branch)
    np.testing.assert_allclose(total, want_total, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(n, want, rtol=1e-5, atol=1e-5)
    if branch is not None:
        np.testing.assert_array_equal(gated_sum(x, branch), total)


def test_low_precision_is_rounded_where_it_is_returned() -> None:
    x, y = drawn(2, 12, D, dtype=jnp.bfloat16), drawn(2, 12, D)
    branch = GatedBranch(y, row(3, 2))
    total, n = adaptive_norm(x, norm(), row(3, 1), None, branch=branch)
    assert total.dtype == n.dtype == jnp.bfloat16
    want, _ = wanted(x, norm(), None, None, branch)
    np.testing.assert_allclose(exact(total), want, rtol=2**-8)


# ---- over a mesh, with the kernel's place taken by its steps -------------------------------------


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let an H200 be assumed, and count the shards that its kernel would take."""
    runs: list[tuple[int, ...]] = []

    def forward(launch: Any, rows: Any, parts: Any, name: str) -> Any:
        runs.append(rows[0].shape)
        return list(in_steps(launch.work, rows, parts))

    monkeypatch.setattr(call, "norm_rows", forward)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    with H200.assumed():
        yield runs


def modulated(x: Any, y: Any, table: Any, frames: Any, mesh: Any = None) -> Any:
    rows = [ModulationRow(table, n, frames) for n in range(3)]
    branch = GatedBranch(y, rows[2])
    return adaptive_norm(x, norm(), rows[1], rows[0], branch=branch, mesh=mesh)


def with_gradient(mesh: Any, *of: Any) -> Any:
    """Return outputs, and gradients of x, the branch, the table and what is learned."""

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
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    mesh = auto_mesh(devices, tuple(axes))
    x, y = (drawn(2, 12, D, dtype=jnp.bfloat16) for _ in range(2))
    of = x, y, drawn(2, frames, 3, D), drawn(1, 1, 3, D)
    with ma.Target.named("cpu").assumed():
        want, back = with_gradient(None, *of)
    got = jax.jit(lambda *of: modulated(*of, mesh))(*of)
    spans = axes.get("context", 1)
    # Frames that a device has in part are left to XLA.
    local = (2 // axes.get("fsdp", 1), 12 // spans, D)
    assert set(kernel) == ({local} if spans == 1 or frames == 1 else set())
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(exact(mine), exact(theirs), rtol=2**-7, atol=1e-5)
    for mine, theirs in zip(with_gradient(mesh, *of)[1], back, strict=True):
        np.testing.assert_allclose(exact(mine), exact(theirs), rtol=2e-2, atol=2e-2)


def branched(of_norm: int, of_gate: int, tokens: int = 12, dtype: str = "bfloat16") -> Any:
    x = drawn(2, tokens, D, dtype=dtype)
    return adaptive_norm(x, norm(), row(of_norm, 1), branch=GatedBranch(x, row(of_gate, 2)))


@pytest.mark.parametrize(
    ("of", "runs"),
    [
        ((1, 1, 12, "float16"), 1),
        ((1, 1, 12, "float32"), 0),
        ((4, 2), 0),
        ((3, 4), 0),
        ((4, 1), 1),
        ((1, 4), 1),
        ((1, 1, 0), 0),
    ],
)
def test_what_is_left_to_xla(kernel: Any, of: tuple[Any, ...], runs: int) -> None:
    """float32, vectors of two numbers of frames, and rows of no tokens."""
    total, n = branched(*of)
    assert total.shape == n.shape and len(kernel) == runs


def test_a_gradient_is_that_of_the_steps(kernel: Any) -> None:
    x, y, table, base = *(drawn(2, 12, D, dtype=jnp.bfloat16) for _ in range(2)), *(
        drawn(*of, 3, D) for of in ((2, 3), (1, 1))
    )  # fmt: skip
    jax.vjp(modulated, x, y, table, base)
    assert kernel == []
    modulated(x, y, table, base)
    assert kernel == [(2, 12, D)]


def test_elsewhere_no_kernel_runs() -> None:
    x = jnp.zeros((1, 2, D), jnp.bfloat16)
    work = RowWork(D // 8, 8, "layer", EPS)
    for name in ("cpu", "TPU v6e", "NVIDIA A100", "NVIDIA B200", "NVIDIA H100"):
        assert decide(ma.Target.named(name), work, (x,), (), None) is None


# ---- refusals ------------------------------------------------------------------------------------

BAD: dict[str, Callable[[Any], Any]] = {
    "width": lambda x: adaptive_norm(x, norm(), ModulationRow(jnp.zeros((2, 1, 3, 8)))),
    "frames": lambda x: adaptive_norm(x, norm(), row(5, 1)),
    "batch": lambda x: adaptive_norm(x, norm(), row(3, 1, 3)),
    "branch": lambda x: adaptive_norm(x, norm(), branch=GatedBranch(x[:, :3])),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused(name: str) -> None:
    with pytest.raises(InputError) as caught:
        BAD[name](drawn(2, 12, D))
    check_golden(f"modules/adaptive_norm_{name}", str(caught.value))
