"""FlashAttention-4's backward block by block: a block and its gradients are one array each."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxattn.kernels import kv_block
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.fa4.kernel import Fa4
from tests.cases import judge
from tests.gpu.requirements import skip_unless_available
from tests.reference import attention64, error

pytestmark = pytest.mark.gpu

CUTS = {
    "whole": ((0, None),),
    "halves": ((0, 256), (256, None)),
    "three": ((0, 128), (256, None), (128, -144)),
}


@pytest.mark.parametrize("head_dim", [40, 64, 128])
@pytest.mark.parametrize("cuts", CUTS)
def test_against_float64(cuts: str, head_dim: int) -> None:
    """Three blocks of 400 keys, which end between tiles; two batch rows, so K and V are strided."""
    skip_unless_available("flash")
    rng = np.random.default_rng(7)
    q, k, v, dout = (
        jnp.asarray(rng.normal(size=(2, t, 3, head_dim)), "bfloat16")
        for t in (500, 1200, 1200, 500)
    )
    want = attention64(q, k, v, dout=dout)
    out, lse = jnp.asarray(want.out, "bfloat16"), jnp.asarray(want.lse, jnp.float32)
    blocks = jnp.split(kv_block.pack(k, v), 3, 2)

    @jax.jit
    def gradients(stacked, blocks, rows):
        # XLA hands slices over without a copy, and would then forget which results share memory
        # with which operands.
        q, dout = stacked[0], stacked[1]
        rows = Rows(rows[0], rows[1], dout, rows[2])
        inputs = Inputs(q, k[:, :400], v[:, :400])
        made = Fa4(head_dim**-0.5).accumulator(inputs, rows)
        found = []
        for keys in blocks:
            grads = None
            for cut in CUTS[cuts]:
                grads = made.add(keys, kv_block.KeyRange(*cut), grads)
            found.append(grads)
        return made.dq(), *jnp.concatenate(found, 2), type(made).__name__ == "Fa4DqAccumulator"

    dq, dk, dv, ours = gradients(jnp.stack([q, dout]), blocks, (out, lse, jnp.zeros_like(lse)))
    assert ours, "the launches of fa4-jax are not where they are looked for"
    got, wanted = (dq, dk, dv), (want.dq, want.dk, want.dv)
    judge(
        {"dtype": "bfloat16"},
        {n: error(g, w) for n, g, w in zip(("dq", "dk", "dv"), got, wanted, strict=True)},
    )
