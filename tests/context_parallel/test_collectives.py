"""The plan names every transfer of a program: its kind, how often, and the bytes of a ring's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from tests.context_parallel.test_zigzag import free_permutes as free_permutes
from tests.jaxprs import of_primitive

# The names of jax's primitives, by those of plans.
KINDS = {"psum_scatter": "reduce_scatter"} | {
    kind: kind for kind in ("ppermute", "all_to_all", "all_gather", "psum")
}
IDS = np.sort(np.random.default_rng(0).integers(0, 3, (1, 64)), 1).astype(np.int32)


class Case(NamedTuple):
    """A config of so many devices of the sequence, a mask, sizes, and the shape of a bias."""

    settings: dict[str, Any]
    context: int = 8
    mask: M.Mask | None = None
    length: int = 64
    heads: int = 2
    dtype: str = "float32"
    bias: tuple[int, ...] | None = None


RING = {"attention": "ring"}
BOTH_WAYS = RING | {"ring_direction": "both_ways"}
ULYSSES, GROUPS = ({"attention": name} for name in ("ulysses", "ulysses_ring"))
WINDOWS = {"window of blocks": M.BlockSlidingWindow(8, 3), "window": M.LocalWindow(4, 4)}
CASES = {
    "all_gather": Case({"context_parallel": "all_gather"}, length=37),
    **{f"ring, {n}": Case(RING, mask=m) for n, m in ({"full": None} | WINDOWS).items()},
    **{f"both ways, {n}": Case(BOTH_WAYS, mask=m, length=61)
       for n, m in ({"full": None, "causal": M.Causal()} | WINDOWS).items()},
    "ring, causal": Case(RING, mask=M.Causal(), length=61),
    "ulysses": Case(ULYSSES, heads=16),
    "ulysses, 2 groups of heads": Case(ULYSSES | {"ulysses_attention_chunks": 2}, heads=16),
    "ulysses, more groups asked": Case(ULYSSES | {"ulysses_attention_chunks": 5}, heads=16),
    "2 x 4": Case(GROUPS | {"ulysses_shards": 4}, heads=16),
    "4 x 2": Case(GROUPS | {"ulysses_shards": 2}, heads=16),
    "4 x 2, 2 groups of heads": Case(
        GROUPS | {"ulysses_shards": 2, "ulysses_attention_chunks": 2}, heads=16,
    ),
    "8 x 1, a plain ring": Case(GROUPS | {"ulysses_shards": 1}, heads=16),
    "2 x 2 beside data": Case(
        GROUPS | {"ulysses_shards": 2, "ici_data_parallelism": 2}, 4, heads=16
    ),
}  # fmt: skip
# In bfloat16 what travels in float32 has a size of its own.
ZIGZAG = {
    "segments": Case(RING, 4, M.Causal() & M.Segments(IDS, IDS), heads=4, dtype="bfloat16"),
    "bias": Case(RING, 4, M.Causal(), 64, 4, "bfloat16", (1, 4, 64, 64)),
    "bias of keys": Case(
        RING, 4, M.Causal() & M.KeyPadding(np.array([50])), 64, 4, "bfloat16", (1, 1, 1, 64)
    ),
    "bias of rows": Case(RING, 4, M.Causal(), 64, 4, "bfloat16", (1, 4, 64, 1)),
    "groups": Case(GROUPS | {"ulysses_shards": 2}, 8, M.Causal(), heads=8),
}


def check(case: Case) -> ma.Plan:
    """Compare the transfers of a forward, and of a step, with those of its plan."""
    sizes = {"ici_data_parallelism": 1, "ici_context_parallelism": case.context}
    kernel = "attention_kernel" if "attention" in case.settings else "attention"
    config = ma.AttentionConfig(**sizes | {kernel: "dot_product"} | case.settings)
    mesh = config.make_mesh(jax.devices()[: case.context * config.ici_data_parallelism])
    batch = config.ici_data_parallelism
    q, k, v = (jnp.ones((batch, case.length, case.heads, 16), case.dtype) for _ in range(3))
    bias = None if case.bias is None else jnp.ones(case.bias)
    plan = ma.plan(ma.Call.of(q, k, mask=case.mask, bias=bias), config, mesh)

    def forward(q: Any, k: Any, v: Any, bias: Any) -> Any:
        return ma.attention(q, k, v, mask=case.mask, bias=bias, config=config, mesh=mesh)

    def step(*x: Any) -> Any:
        wanted = (0, 1, 2) if bias is None else (0, 1, 2, 3)
        return jax.value_and_grad(lambda *x: (forward(*x) ** 2).sum(), wanted)(*x)

    programs: dict[tuple[str, ...], Callable[..., Any]] = {
        ("forward",): forward, ("forward", "backward"): step
    }  # fmt: skip
    for when, program in programs.items():
        jaxpr = jax.make_jaxpr(program)(q, k, v, bias).jaxpr
        for kind, primitive in KINDS.items():
            named = [c for c in plan.collectives if c.kind == kind and c.when in when]
            sent = of_primitive(jaxpr, primitive)
            assert sum(c.hops * c.arrays for c in named) == len(sent), (kind, when)
            if kind == "ppermute":
                arrays = [x.aval for eqn in sent for x in eqn.outvars]
                size = sum(x.size * x.dtype.itemsize for x in arrays)
                assert sum(c.bytes for c in named) == size, (kind, when)
    return plan


@pytest.mark.parametrize("name", CASES)
def test_the_plan_names_every_transfer(name: str) -> None:
    label = check(CASES[name]).strategy.label()
    assert ("both ways" in label) == name.startswith("both ways")


@pytest.mark.parametrize("name", ZIGZAG)
def test_in_zig_zag(name: str, free_permutes: None) -> None:
    assert "zig-zag" in check(ZIGZAG[name]).strategy.label()
