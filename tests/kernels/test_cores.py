"""The backward of the TPU kernels on devices with two cores: heads become batch rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.splash.kernel import Splash
from tests.jaxprs import of_primitive
from tests.reference import error
from tests.waiting import but

CPU = ma.Target.named("cpu", (("tokamax", "0.0.17"),))
SETTINGS: dict[str, dict[str, Any]] = {
    "flash": {"attention": "flash"},
    "flash fused": {"attention": "flash", "flash_block_sizes": {"use_fused_bwd_kernel": True}},
    "tokamax_flash": {"attention": "tokamax_flash"},
}
MASKS = {
    "full": M.Full(),
    "window": M.BlockSlidingWindow(24, 3),
    "lengths": M.KeyPadding(np.array([150, 90, 201], np.int32)),
}


def operands(batch: int, heads: int, kv_heads: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(5), 4)
    shapes = [(batch, 201, n, 64) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))


def gradients(kernel: Splash, mask: M.Mask, given: tuple[jax.Array, ...]) -> tuple[Any, ...]:
    q, k, v, dout = given
    bound = mask.bind(201, 201, q.shape[0], q.shape[2])
    inputs = Inputs(q, k, v, mask=bound)
    out, lse = kernel.forward(inputs)
    return kernel.backward(inputs, Rows(out, lse, dout, jnp.zeros_like(lse)))[:3]


# A mask, shared heads, a batch, and heads alone.
CASES = [(1, 4, 4, "window"), (1, 4, 2, "full"), (3, 2, 2, "lengths"), (1, 2, 1, "full")]
FEW = [("flash fused", CASES[0])]


@pytest.mark.parametrize(("name", "case"), but(product(SETTINGS, CASES), FEW))
def test_two_cores_give_the_gradients_of_one(name: str, case: tuple[int, int, int, str]) -> None:
    if name == "tokamax_flash":
        pytest.importorskip("tokamax")
    batch, heads, kv_heads, mask = case
    call = ma.Call(batch, 201, 201, heads, kv_heads, 64, "float32")
    kernel = ma.plan(call, ma.AttentionConfig(**SETTINGS[name]), target=CPU).kernel
    assert isinstance(kernel, Splash) and kernel.cores == 1
    given, which = operands(batch, heads, kv_heads), MASKS[mask]
    runs = [jax.jit(partial(gradients, replace(kernel, cores=n), which)) for n in (1, 2)]
    one, two = (run(given) for run in runs)
    assert max(error(b, np.asarray(a, np.float64)) for a, b in zip(one, two, strict=True)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "batch", "heads", "rows"),
    [("v5p", 1, 8, 2), ("v4", 3, 8, 6), ("v5p", 2, 8, 2), ("v5p", 1, 3, None), ("v6e", 1, 8, None)],
)
def test_each_core_has_rows(kind, batch, heads, rows):
    """The batch is the first axis of the backward's grids, and the only one split over cores.

    With one batch row the grid has no such axis, but heads, queries and keys.
    """
    x = jax.ShapeDtypeStruct((batch, 1024, heads, 128), "bfloat16")

    def run(q: Any, k: Any, v: Any) -> Any:
        config = ma.AttentionConfig(attention="flash")
        return ma.attention(q, k, v, config=config).astype("float32").sum()

    with ma.Target.named(kind).assumed():
        traced = jax.make_jaxpr(jax.grad(run, argnums=(0, 1, 2)))(x, x, x)
    _, *backward = of_primitive(traced.jaxpr, "pallas_call")
    grids = [eqn.params["grid_mapping"].grid for eqn in backward]
    assert len(grids) == 2 and {len(grid) for grid in grids} == {3 if rows is None else 4}
    assert all(batch * heads // (rows or 1) in grid for grid in grids)
    assert rows is None or all(grid[0] == rows for grid in grids)
