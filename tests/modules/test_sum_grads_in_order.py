"""The gradients of an input that is projected several times: each sum takes a matmul's result
first.

XLA has cuBLASLt add in its matmul where the matmul is the first operand of a sum; else a pass of
its own adds.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn.modules.base import sum_grads_in_order

MOVES = ("reshape", "name")


def made_by(jaxpr: Any, variable: Any) -> str:
    """Name the operation that a value comes from, past those that only move it."""
    while True:
        source = next((e for e in jaxpr.eqns if variable in e.outvars), None)
        if source is None or source.primitive.name not in MOVES:
            return "input" if source is None else source.primitive.name
        variable = source.invars[0]


def sums(function: Any, *inputs: Any) -> list[tuple[str, ...]]:
    """List what the sums of gradients of the inputs' size are made of."""
    jaxpr = jax.make_jaxpr(function)(*inputs).jaxpr
    found = [
        e
        for e in jaxpr.eqns
        if e.primitive.name == "add_any" and e.invars[0].aval.size == inputs[0].size
    ]
    return [tuple(made_by(jaxpr, v) for v in e.invars) for e in found]


@pytest.mark.parametrize("joint", [False, True])
def test_sums_begin_with_a_matmul(joint: bool) -> None:
    module = (ma.JointAttention if joint else ma.FlaxAttention)(
        16, heads=2, dim_head=8, rngs=nnx.Rngs(0)
    )
    x = jnp.ones((1, 6, 16))

    def gradients(x: Any) -> Any:
        out, vjp = jax.vjp(lambda *x: module(*x), *([x, 2 * x] if joint else [x]))
        return vjp(out)

    found = sums(gradients, x)
    assert sorted(found) == sorted(
        [("dot_general", "dot_general"), ("dot_general", "add_any")] * (1 + joint)
    )


def test_sum_grads_in_order_is_the_identity() -> None:
    x = jnp.arange(6.0).reshape(2, 3)
    out, vjp = jax.vjp(sum_grads_in_order, x)
    assert np.array_equal(out, x) and np.array_equal(vjp(2 * x)[0], 2 * x)


def test_sum_grads_in_order_makes_no_second_variable_of_its_input() -> None:
    """Of two a scan over layers would keep both for the backward."""
    x = jnp.ones((2, 3))
    assert "reshape" not in str(
        jax.make_jaxpr(sum_grads_in_order)(x).jaxpr.eqns[0].params["call_jaxpr"]
    )
    out, tangent = jax.jvp(sum_grads_in_order, (x,), (3 * x,))
    assert np.array_equal(out, x) and np.array_equal(tangent, 3 * x)
