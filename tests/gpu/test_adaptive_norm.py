"""The adaptive norm in one kernel on a Hopper GPU, against XLA's steps in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from maxattn.modules import GatedBranch, ModulationRow, adaptive_norm
from maxattn.modules.adaptive_layer_norm import decide
from maxattn.modules.row_kernel.work import RowWork
from maxattn.target import Target
from tests.gpu.requirements import skip_unless_available

pytestmark = pytest.mark.gpu
LIMIT = {"float16": 2e-3, "bfloat16": 1e-2}
# B, T, D, frames of scale and shift, frames of the gate; None without a branch
CASES: dict[str, tuple[Any, ...]] = {
    "frames": (1, 4680, 1536, 3, None),
    "gated, frames": (1, 4680, 1536, 3, 3),
    "gated, one time": (2, 1023, 3072, 1, 1),
    "gated, wide": (1, 777, 5120, 1, 1),
    "a time for each token": (2, 333, 1152, 333, 1),
    "few": (1, 1, 128, 1, 1),
}


def one_device() -> Mesh:
    """A mesh of one device; without it, XLA computes the steps if there are several GPUs."""
    return Mesh(np.asarray(jax.devices()[:1]), ("fsdp",))


def made(case: tuple[Any, ...], dtype: Any, learned: bool) -> tuple[Any, ...]:
    b, t, d, frames, of_gate = case
    keys = iter(jax.random.split(jax.random.key(3), 8))
    x, y = (jax.random.normal(next(keys), (b, t, d), dtype) for _ in range(2))
    table = jax.random.normal(next(keys), (b, frames, 6, d), jnp.bfloat16)
    base = jax.random.normal(next(keys), (1, 1, 6, d))
    norm = nnx.LayerNorm(
        d, epsilon=1e-6, use_bias=learned, use_scale=learned, use_fast_variance=False,
        dtype=jnp.float32, rngs=nnx.Rngs(0),
    )  # fmt: skip
    gate = None if of_gate is None else jax.random.normal(next(keys), (b, of_gate, 6, d))
    return norm, x, y, table, base, gate


def run(norm: Any, x: Any, y: Any, table: Any, base: Any, gate: Any, learned: bool) -> Any:
    rows = [ModulationRow(table, n, base) for n in (1, 0)]
    bias = base[0, 0, 3]
    branch = None if gate is None else GatedBranch(y, ModulationRow(gate, 2, base), bias)
    rows = [] if learned else rows
    return adaptive_norm(x, norm, *rows, branch=branch, mesh=one_device())


def error(got: Any, want: Any) -> float:
    got, want = (np.asarray(a, np.float64) for a in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("learned", [False, True], ids=["modulated", "learned"])
@pytest.mark.parametrize("dtype", LIMIT)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_against_float32(case: tuple[Any, ...], dtype: str, learned: bool) -> None:
    skip_unless_available("flash")  # fa4-jax brings CuTe
    norm, *arrays = made(case, dtype, learned)
    work = RowWork(case[2] // 8, 8, "layer", 1e-6)
    assert decide(Target.here(), work, (arrays[0],), (), one_device()) is not None
    wide = [a if a is None else a.astype(jnp.float32) for a in arrays]

    @jax.jit
    def alone(*of: Any) -> Any:
        return run(norm, *of, learned)

    @jax.jit
    def both(*of: Any) -> Any:
        out, pull = jax.vjp(lambda *of: run(norm, *of, learned), *of)
        return out, pull(jax.tree.map(lambda y: y + jnp.ones_like(y), out))

    (got, back), (want, wanted) = both(*arrays), both(*wide)
    # The kernel runs where nobody takes a gradient, XLA's steps where somebody does.
    for mine in (alone(*arrays), got):
        assert all(error(*each) < LIMIT[dtype] for each in zip(mine, want, strict=True))
    for mine, exact in zip(jax.tree.leaves(back), jax.tree.leaves(wanted), strict=True):
        assert not np.any(exact) or error(mine, exact) < 4 * LIMIT[dtype]


def test_the_program_calls_the_kernel() -> None:
    skip_unless_available("flash")  # fa4-jax brings CuTe
    norm, *arrays = made(CASES["gated, frames"], "bfloat16", False)
    text = jax.jit(lambda *of: run(norm, *of, False)).lower(*arrays).as_text()
    assert "cutejax.adaptive_norm" in text
    assert "cutejax.adaptive_norm" not in jax.jit(
        jax.grad(lambda x, *of: run(norm, x, *of, False)[1].astype(jnp.float32).sum())
    ).lower(*arrays).as_text()  # fmt: skip
