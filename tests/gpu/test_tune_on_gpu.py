"""`maxattn tune` on an NVIDIA GPU: the real command, and plans from its results."""

from __future__ import annotations

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn.masks import KeyPadding
from maxattn.target import Target
from maxattn.tools.cli import main
from maxattn.tools.model_shapes import read
from tests.cases import compare, draw_operands
from tests.gpu.requirements import skip_unless_available
from tests.reference import attention64

pytestmark = pytest.mark.gpu
CASES = {"1,512,512,4,72": None, "2,300,64,4,64": "lengths:9,64"}


@pytest.mark.parametrize("text", CASES)
def test_a_plan_takes_what_was_fastest_here(text, tmp_path, monkeypatch, capsys):
    skip_unless_available("cudnn")
    monkeypatch.setenv("MAXATTN_CACHE", str(tmp_path))
    monkeypatch.setattr("maxattn.tools.tune.kernel_times.SECONDS", 0.05)
    spelt = CASES[text]
    words = ["tune", "attention=auto", "--shape", text] + (["--mask", spelt] if spelt else [])
    assert main(words) == 0
    (found,) = json.loads((tmp_path / "tuned.json").read_text())["measurements"]
    assert found["forward_ms"].keys() >= {"cudnn", "dot_product"} <= found["backward_ms"].keys()
    shape, lengths = read(text), np.array([9, 64], np.int32)
    shape = replace(shape, mask=KeyPadding(lengths)) if spelt else shape
    plan = ma.plan(shape.call())
    assert plan.because.startswith("measured here by maxattn tune: forward ")
    assert main(words) == 0 and "measured before" in capsys.readouterr().out
    bare = Target.here().untuned()
    own = ma.plan(shape.call(), target=bare).kernel.name.split("/")
    names = plan.kernel.name.split("/")
    for taken, its, key in (
        (names[0], own[0], "forward_ms"),
        (names[-1], own[-1], "backward_ms"),
    ):
        ms = {name: float(np.median(rounds)) for name, rounds in found[key].items()}
        assert ms[taken] <= ms.get(its, np.inf) * 1.01 or taken == its
    _check_result(shape, lengths if spelt else None)


def _check_result(shape, lengths) -> None:
    """Compare attention with the tuned plan with float64."""
    sizes = shape.batch, shape.q_len, shape.kv_len, shape.heads, shape.heads, shape.head_dim
    drawn = draw_operands(*sizes)
    q, k, v = (jnp.asarray(drawn[x], "bfloat16") for x in "qkv")
    real = np.full(shape.batch, shape.kv_len) if lengths is None else lengths
    allowed = (np.arange(shape.kv_len) < real[:, None])[:, None, None]
    out = jax.jit(lambda q, k, v: ma.attention(q, k, v, shape.mask, role=shape.role))(q, k, v)
    compare((out,), attention64(q, k, v, allowed), 1e-2)
