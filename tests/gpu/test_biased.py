"""A bias in the form that GPU libraries take, on a CPU, with a dense library.

Tests its levels, masks written into it, odd lengths, strategies, and its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn.kernels import table
from maxattn.kernels.base import Inputs
from maxattn.kernels.bias_level import bias_level
from maxattn.kernels.fused import limits
from maxattn.kernels.fused.biased import Biased
from tests.cases import KINDS, MASKS, TOLERANCE, arrays, judge, run_case
from tests.gpu.dense import DenseLibrary
from tests.gpu.far_bias import drawn
from tests.gpu.far_bias import judge as judge_far
from tests.pairwise import name_of, pairwise
from tests.reference import error
from tests.waiting import few, slow

AXES = {
    "mask": list(MASKS),
    "bias": ["full", "1NTS", "shared", "keys", "far"],
    "heads": ["mha", "gqa", "mqa"],
    "length": ["64", "odd", "cross", "one", "short"],
    "head_dim": [16, 20],
    "batch": [1, 3],
    "dtype": ["float32"],
}
SHARDED = {
    "strategy": ["none", "ring", "all_gather", "ulysses"],
    "mask": ["full", "causal", "lengths", "segments", "block window"],
    "bias": ["full", "1NTS", "shared", "keys", "far"],
    "length": ["64", "odd"],
}
FIXED = {"heads": "8 of 8", "head_dim": 16, "batch": 2, "dtype": "float32"}


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """Let a config name the dense library as its kernel."""
    table.add(table.KernelRow("dense_library", "tests.gpu.dense:DenseLibrary"))
    yield
    table.remove("dense_library")


CORE = ("mask", "bias")
# Masks of the same kind are written into a bias alike: one of each kind meets every bias.
REST = {"mask": [mask for mask in MASKS if mask not in KINDS], "bias": ["full"], "heads": ["gqa"],
        "length": ["cross"], "head_dim": [20], "batch": [3]}  # fmt: skip
# A bias that the batch shares and lengths that divide meet strategies, below.
WRITTEN = {"bias": ["full", "shared", "keys", "far"], "length": ["odd", "cross", "one", "short"]}
FEW = pairwise(AXES | WRITTEN | {"mask": KINDS}, lambda case: True, core=CORE)
FEW += pairwise(AXES | REST, lambda case: True)


# Every mask and every bias; make test-all has each mask beside each bias.
@pytest.mark.parametrize(
    "case", [*few(FEW), *slow(pairwise(AXES, lambda case: True, core=CORE))], ids=name_of
)
def test_pairs_of_masks_and_biases(case: dict) -> None:
    judge(case, run_case(case, ma.AttentionConfig(attention="dense_library")))


# A strategy cuts masks and biases each by its axes; each other they meet above.
@pytest.mark.parametrize(
    "case",
    few(pairwise(SHARDED, lambda case: True, core=("strategy", "length"))),
    ids=name_of,
)
def test_strategies(case: dict) -> None:
    config = ma.AttentionConfig(
        attention="dense_library",
        context_parallel=case["strategy"],
        ici_context_parallelism=2,
        ici_data_parallelism=2,
        ici_tensor_parallelism=2,
    )
    case = case | FIXED
    judge(case, run_case(case, config, config.make_mesh(jax.devices()[:8])))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("axes", [(3, 4, 45), (1, 4, 45), (1, 1, 45), (3, 1, 1)])
def test_a_plan_says_what_is_written(axes: tuple[int, int, int], mask: str) -> None:
    """Levels and masks by batch row turn a shared bias into an array with a batch axis."""
    shapes = (3, 45, 4, 16), (3, 130, 4, 16), (*axes, 130)
    q, k, x = (jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes)
    given = MASKS[mask](3, 4, 45, 130)
    bound = (M.Full() if given is None else given).bind(45, 130, 3, 4)

    def written(q: Any, k: Any, x: Any) -> Any:
        inputs = Inputs(q, k, k, x, bound, bias_level=bias_level(x, bound, 45))
        return Biased.of(inputs, DenseLibrary).given.bias

    batch, heads, t, s = limits.written_shape(ma.Call.of(q, k, given, bias=x))
    made = jax.eval_shape(written, q, k, x)
    assert made is not None and made.shape == (batch, heads, t + -t % 2, s + -s % 8)


# Beside the least bfloat16 float64 would keep nothing of a score either.
LEVELS = [0.0, 3.0, 500.0, 1e4, -1e9, -1e12]


@partial(jax.jit, static_argnames="mask")
def with_gradients(
    q: Any, k: Any, v: Any, bias: Any, dout: Any, mask: M.Mask | None = None
) -> tuple[Any, ...]:
    """Return the output and the gradients of q, k, v and bias."""
    config = ma.AttentionConfig(attention="dense_library")
    attend = partial(ma.attention, mask=mask, config=config)
    out, pull = jax.vjp(lambda *x: attend(*x[:3], bias=x[3]), q, k, v, bias)
    return out, *pull(dout)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_biases_far_from_0(dtype: str, level: float) -> None:
    """One query row has all biases far from 0, one a few, and one has no key."""
    level = float(np.clip(level, -6e4, 6e4)) if dtype == "float16" else level
    *x, bias = drawn(6, 10, 16, dtype)
    bias = bias.at[:, :, 1].add(level).at[:, :, 2, :3].add(level).at[:, :, 3].set(-jnp.inf)
    bias = bias.at[:, :, 4, 2:].set(-jnp.inf).at[:, :, 5, 1:].set(jnp.finfo(dtype).min)
    q, k, v, dout = x
    got = with_gradients(q, k, v, bias, dout)
    # The output that the backward is given was rounded: of few and small dS that is more.
    judge_far(got, (*x, bias), 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("mapped", ["all", "queries", "bias"])
def test_mapped(mapped: str) -> None:
    x = arrays(FIXED | {"mask": "causal", "bias": "shared", "length": "odd"})
    many = {n: np.stack([x[n], x[n] * 0.5, x[n] + 1.0]) for n in ("q", "k", "v", "bias", "dout")}
    axes = {
        n: 0 if mapped == "all" or n == {"queries": "q", "bias": "bias"}[mapped] else None
        for n in many
    }
    both = partial(with_gradients, mask=M.Causal())
    given = [many[n] if axes[n] == 0 else x[n] for n in many]
    got = jax.jit(jax.vmap(both, tuple(axes.values())))(*given)
    for i in range(3):
        one = both(*(y[i] if a == 0 else y for y, a in zip(given, axes.values(), strict=True)))
        for mine, alone in zip(got, one, strict=True):
            assert error(mine[i], alone) < 2e-5


@pytest.mark.parametrize("argnums, asked", [((0,), False), ((1,), True), ((0, 1), True)])
@pytest.mark.parametrize("kernel", ["cudnn", "auto"])
def test_the_gradient_of_a_bias_is_computed_where_it_is_asked_for(
    kernel: str, argnums: tuple[int, ...], asked: bool
) -> None:
    """cuDNN needs B N T S numbers of memory for it."""
    q, bias = jnp.ones((2, 64, 4, 64), "bfloat16"), jnp.zeros((2, 4, 64, 64), "bfloat16")

    def loss(q: Any, bias: Any) -> Any:
        config = ma.AttentionConfig(attention=kernel)
        return ma.attention(q, q, q, bias=bias, config=config).sum()

    with ma.Target.named("NVIDIA H200").assumed():
        made = str(jax.make_jaxpr(jax.jit(jax.grad(loss, argnums)))(q, bias))
    assert made.count("variadic_args=(True, False)") == (1 if asked else 2)
    assert made.count("variadic_args=(True, True)") == (1 if asked else 0)
