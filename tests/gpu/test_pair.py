"""Pairs of kernels: one kernel's forward with another's backward."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.composed.pair import Pair
from maxattn.kernels.dot_product import DotProduct
from maxattn.masks import Full
from tests.cases import allowed, arrays, compare
from tests.gpu.dense import DenseLibrary
from tests.reference import attention64


@pytest.mark.parametrize("mask", ["full", "causal & lengths"])
@pytest.mark.parametrize("turned", [False, True])
def test_pair(mask: str, turned: bool) -> None:
    case = {"dtype": "float32", "heads": "gqa", "length": "odd", "head_dim": 16, "bias": "none"}
    x = arrays(case | {"batch": 2, "mask": mask})
    t, s = x["q"].shape[1], x["k"].shape[1]
    bound = Full() if x["mask"] is None else x["mask"].bind(t, s, 2, 4)
    kernels = DotProduct(0.25), DenseLibrary(0.25, lse_gradient=True)
    pair = Pair(*(kernels[::-1] if turned else kernels))
    inputs, ok = Inputs(x["q"], x["k"], x["v"], mask=bound), allowed(x["mask"], t, s)
    out, lse = pair.forward(inputs)
    dlse = jnp.where(jnp.isfinite(lse), x["dlse"], 0.0)
    got = out, lse, *pair.backward(inputs, Rows(out, lse, x["dout"], dlse))[:3]
    operands = x["q"], x["k"], x["v"], ok
    compare(got, attention64(*operands, scale=0.25, dout=x["dout"], dlse=dlse))
    assert pair.name == "/".join(k.name for k in (pair.first, pair.second))
