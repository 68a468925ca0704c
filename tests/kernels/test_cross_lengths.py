"""Cross-attention to texts of every length that the models have: forward and gradients, and the
TPU's own compiler.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from tests.block_sizes.compiler import PYTHON, TOPOLOGIES, Compiler
from tests.reference import attention64
from tests.waiting import but

LENGTHS = (1, 77, 226, 257, 300, 333, 600, 1000, 1300)
# One token, several tiles, and a tile that is not full.
FEW = [*(("flash", n) for n in (1, 333, 1300)), ("tokamax_flash", 1300)]


@pytest.mark.parametrize(
    ("kernel", "length"), but(product(("flash", "tokamax_flash"), LENGTHS), FEW)
)
def test_forward_and_gradients(kernel: str, length: int) -> None:
    """77 queries of a text of `length` tokens; the second batch row has two thirds of them."""
    if kernel == "tokamax_flash":
        pytest.importorskip("tokamax")
    rng = np.random.default_rng(length)
    q, dout = (jnp.asarray(rng.normal(size=(2, 77, 2, 64)), "float32") for _ in range(2))
    k, v = (jnp.asarray(rng.normal(size=(2, length, 2, 64)), "float32") for _ in range(2))
    lengths = np.array([length, -(-2 * length // 3)], np.int32)
    config = ma.AttentionConfig(
        cross_attention=kernel, flash_block_sizes={"block_kv": 512, "block_kv_compute": 256}
    )

    @jax.jit
    def run(q, k, v):
        attend = partial(ma.attention, mask=M.KeyPadding(lengths), config=config, role="cross")
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    ok = np.arange(length) < lengths[:, None, None, None]
    want = attention64(q, k, v, ok, dout=dout)
    for got, exact in zip(run(q, k, v), (want.out, want.dq, want.dk, want.dv), strict=True):
        # One key's dQ and dK are 0, so rounding is measured against 1 where a gradient is smaller.
        assert np.abs(np.asarray(got) - exact).max() < 2e-5 * max(1.0, np.abs(exact).max())


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    with Compiler() as compiler:
        yield compiler


@pytest.mark.slow
@pytest.mark.skipif(
    PYTHON is None, reason="neither libtpu here nor MAXATTN_TPU_PYTHON: the TPU's compiler"
)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("kind", ["TPU v5p", "TPU v6e"])
@pytest.mark.parametrize("kernel", ["flash", "tokamax_flash"])
@pytest.mark.parametrize("length", LENGTHS)
def test_the_tpus_compiler_takes_it(
    length: int, kernel: str, kind: str, training: bool, compiler: Compiler
) -> None:
    case = {
        "kind": kind, "topology": TOPOLOGIES[kind], "kernel": kernel, "training": training,
        "role": "cross", "batch": 1, "q_len": 4096, "kv_len": length, "heads": 2,
        "head_dim": 128, "dtype": "bfloat16", "mask": "padding",
    }  # fmt: skip
    answer = compiler.compile(case)
    assert answer["ok"], answer["message"]
