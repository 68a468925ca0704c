"""The vmap rule of a library's call: mapped axes become part of the batch, in one call.

The library is a stand-in with the same interface: a dense kernel in plain JAX whose operands must
have equal batches. tests/gpu/test_vmap_on_gpu.py tests the libraries themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import maxattn as ma
from maxattn.kernels import table
from maxattn.kernels.base import Grads, Result, Rows
from maxattn.kernels.fold_batch import with_batch_folded
from maxattn.kernels.fused.rectangles import PieceInputs
from maxattn.masks import Causal, Full, KeyPadding
from tests.gpu.dense import DenseLibrary
from tests.kernels.mapped import Mapped, one_of, step
from tests.waiting import but

B, T, S, MANY = 2, 5, 7, 3
SIZES = Mapped(B, T, S, 4, 2, 8, 0.3)
batches: list[int] = []


@jax.custom_batching.custom_vmap
def unbatched(x: Any) -> Any:
    """Check that an operand of a foreign call is not mapped."""
    return x


@unbatched.def_vmap
def _refuse(size: int, mapped: Any, x: Any) -> Any:
    raise NotImplementedError("a foreign call has no rule for vmap")


@dataclass(frozen=True)
class Foreign(DenseLibrary):
    """The dense library, which has no vmap rule of its own, inside the rule."""

    name: ClassVar[str] = "foreign"

    @staticmethod
    def build(call: ma.Call, config: Any, target: Any) -> Foreign:
        return Foreign(call.scale, call.return_lse)

    def piece_forward(self, inputs: PieceInputs) -> Result:
        return with_batch_folded(self._one_forward, inputs)

    def piece_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        return with_batch_folded(self._one_backward, inputs, rows)

    def _one_forward(self, inputs: PieceInputs) -> Result:
        batches.append(inputs.q.shape[0])
        return super().piece_forward(jax.tree.map(unbatched, inputs))

    def _one_backward(self, inputs: PieceInputs, rows: Rows) -> Grads:
        return super().piece_backward(jax.tree.map(unbatched, inputs), rows)


@pytest.fixture(autouse=True)
def library() -> Iterator[None]:
    """Let a config name the library."""
    table.add(table.KernelRow("foreign", "tests.kernels.test_fold_batch:Foreign"))
    yield
    table.remove("foreign")


def attend(causal: bool, q: Any, k: Any, v: Any, lengths: Any) -> Any:
    mask = (Causal(2) if causal else Full()) & (Full() if lengths is None else KeyPadding(lengths))
    config = ma.AttentionConfig(attention="foreign")
    return ma.attention(q, k, v, mask=mask, config=config, scale=0.3)


def _step(causal: bool) -> Any:
    return step(partial(attend, causal))


def _pairs(causal: bool, lengths: Any) -> Any:
    return SIZES.real(lengths) & ((np.arange(S) <= np.arange(T)[:, None] + 2) | (not causal))


AXES = [(0,) * 4, (None, None, None, 0), (0, None, None, None), (None, 1, None, 0), (1, 2, 0, 0)]


# Every case is compiled; make test-all runs them op by op, too.
@pytest.mark.parametrize(
    ("axes", "causal", "jitted"), but(product(AXES, (False, True), (True, False)), lambda x: x[2])
)
def test_vmap_of_gradients(axes: tuple[int | None, ...], causal: bool, jitted: bool) -> None:
    x = SIZES.drawn(axes, (MANY,))
    run = jax.vmap(_step(causal), in_axes=(*axes, 0))
    got = (jax.jit(run) if jitted else run)(*x)
    for i in range(MANY):
        one = one_of(x, axes, i)
        SIZES.judge([g[i] for g in got], one, _pairs(causal, one[3]))


def test_nested_vmaps_are_one_call() -> None:
    axes, many = (0, None, 0, 0), (MANY, 2)
    x, each = SIZES.drawn(axes, many), (*axes, 0)
    batches.clear()
    got = jax.jit(jax.vmap(jax.vmap(_step(True), each), each))(*x)
    assert batches[-1] == MANY * 2 * B
    for at in np.ndindex(*many):
        one = one_of(x, axes, *at)
        SIZES.judge([g[at] for g in got], one, _pairs(True, one[3]))


def test_inside_shard_map() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:2], ("data",))
    x, spec, run = SIZES.drawn((0,) * 4, (4,)), P("data"), jax.vmap(_step(False))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    for got, want in zip(jax.jit(sharded)(*x), jax.jit(run)(*x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def _weighed(x: Any, weights: Any) -> Any:
    batches.append(x.shape[0])
    return (unbatched(x) * unbatched(weights[0])).sum(1)


@pytest.mark.parametrize("mapped", ["batch", "shared", "both"])
def test_what_has_no_batch_is_shared_by_it(mapped: str) -> None:
    """If an operand without a batch axis is mapped, the calls run one after another."""
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(MANY, B, T)), rng.normal(size=(MANY, T))
    axes = {"batch": (0, None), "shared": (None, 0), "both": (0, 0)}[mapped]
    given = tuple(y if a == 0 else y[0] for y, a in zip((x, weights), axes, strict=True))
    batches.clear()
    call = lambda x, w: with_batch_folded(_weighed, x, shared=(w,))  # noqa: E731
    got = jax.vmap(call, axes)(*given)
    each = [
        tuple(y[i] if a == 0 else y for y, a in zip(given, axes, strict=True)) for i in range(MANY)
    ]
    want = np.stack([(x * w).sum(1) for x, w in each])
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert set(batches[1:]) == ({MANY * B} if mapped == "batch" else {B})
