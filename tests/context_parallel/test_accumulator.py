"""Which kernels sum dQ over the blocks of a ring in place; no strategy names such a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import maxattn
from maxattn.kernels import KERNELS
from maxattn.kernels.base import Inputs, Rows
from maxattn.kernels.composed.pair import Pair
from maxattn.kernels.dot_product import DotProduct
from maxattn.kernels.fa4.kernel import HopperFa4, LibraryFa4
from maxattn.kernels.kv_block import SumOfParts

FA4, DENSE = HopperFa4(0.1), DotProduct(0.1)


def inputs(length: int = 8190, heads: int = 40, kv_heads: int = 40) -> Inputs:
    q: Any = jax.ShapeDtypeStruct((1, length, heads, 128), "bfloat16")
    k: Any = jax.ShapeDtypeStruct((1, length, kv_heads, 128), "bfloat16")
    return Inputs(q, k, k)


def test_a_pair_answers_with_its_second() -> None:
    assert "block by block" in Pair(DENSE, FA4).accumulator_line(inputs())
    assert Pair(FA4, DENSE).accumulator_line(inputs()) == ""


@pytest.mark.parametrize("why", ["short", "shared keys", "gradient of the LSE", "other GPUs"])
def test_flash_attention_4_sums_parts_where_its_launches_do_not_fit(why: str) -> None:
    kind = LibraryFa4 if why == "other GPUs" else HopperFa4
    kernel = kind(0.1, why == "gradient of the LSE")
    x = inputs(8 if why == "short" else 256, 2, 1 if why == "shared keys" else 2)
    out, lse = jnp.zeros(x.q.shape, "bfloat16"), jnp.zeros((1, 2, x.q.shape[1]))
    assert isinstance(kernel.accumulator(x, Rows(out, lse, out, lse)), SumOfParts)
    assert kernel.accumulator_line(x) == ""


def test_some_kernel_may_keep_dq_on_a_gpu_and_none_elsewhere() -> None:
    x = inputs()
    call = maxattn.Call.of(x.q, x.k)
    may = {p: [n for n, k in KERNELS.items() if k.may_keep_dq(call, p)] for p in ("gpu", "tpu")}
    assert may == {"gpu": ["flash"], "tpu": []}


def test_no_strategy_names_a_kernel() -> None:
    folder = Path(maxattn.__file__).parent
    shared = ("base", "composed/pair", "composed/padded_heads", "kv_block")
    files = [*folder.glob("context_parallel/**/*.py")]
    files += [folder / "kernels" / f"{name}.py" for name in shared]
    assert len(files) > 15
    assert not [file.name for file in files if "fa4" in file.read_text().lower()]
