"""Repeated calls give equal numbers, which a race between threads would change."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxattn as ma
from maxattn import masks as M
from maxattn._attention import run
from maxattn.errors import Unsupported
from maxattn.kernels import KERNELS
from tests.gpu.requirements import skip_unless_available

CALLS, QUERIES = 100, 4096
ROUNDING = 2**-7  # of the largest entry: gradients that are added up in no fixed order


class Case(NamedTuple):
    """A mask, the number of keys, of key heads, and the head dim."""

    mask: M.Mask = M.Full()
    keys: int = QUERIES
    kv_heads: int = 4
    head_dim: int = 128


CASES = {
    "full": Case(),
    "causal": Case(M.Causal()),
    "lengths": Case(M.KeyPadding(np.array([3000]))),
    "window": Case(M.LocalWindow(200, 9)),
    "blocks": Case(M.BlockSlidingWindow(512, 3)),
    "a text": Case(keys=512),
    "a short text": Case(keys=77, head_dim=64),
    "64 channels": Case(head_dim=64),
    "shared keys": Case(kv_heads=2),
}


def most_apart(case: Case, config: ma.AttentionConfig) -> dict[str, float]:
    """Return the largest relative difference of later results from the first call's."""
    rng = np.random.default_rng(7)
    sizes = (QUERIES, 4), (case.keys, case.kv_heads), (case.keys, case.kv_heads), (QUERIES, 4)
    x = tuple(jnp.asarray(rng.normal(size=(1, *size, case.head_dim)), "bfloat16") for size in sizes)

    def gradients(q, k, v, dout):
        out, pull = jax.vjp(lambda *x: ma.attention(*x, mask=case.mask, config=config), q, k, v)
        return out, *pull(dout)

    def apart(got, want):
        got, want = got.astype(jnp.float32), want.astype(jnp.float32)
        return jnp.abs(got - want).max() / jnp.abs(want).max()

    step = jax.jit(gradients)  # one program: another one may add up in another order
    compare = jax.jit(
        lambda got, want: jnp.stack([apart(*pair) for pair in zip(got, want, strict=True)])
    )
    first = step(*x)
    most = np.max([compare(step(*x), first) for _ in range(CALLS)], axis=0)
    return dict(zip(("out", "dq", "dk", "dv"), most.tolist(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "kernel", ["cudnn", "cudnn_flash_te", "flash", "tokamax_flash", "dot_product"]
)
def test_every_call_gives_what_the_first_gave(kernel: str, name: str, record_property) -> None:
    skip_unless_available(kernel)
    x = jax.ShapeDtypeStruct((1, QUERIES, 4, 128), "bfloat16")
    repeats = KERNELS[kernel].repeats(ma.Call.of(x, x), ma.Target.here()) is None
    try:
        found = most_apart(CASES[name], ma.AttentionConfig(attention=kernel, deterministic=repeats))
    except Unsupported as refused:
        assert kernel in str(refused)
        record_property("refused", str(refused))
        return
    assert found["out"] == 0, "the forward varies"
    assert max(found.values()) <= (0 if repeats else ROUNDING), found


# ---- a scan over layers whose backward keeps attention's results --------------------------------

FORWARD = {
    "flash": r"custom_call_target=\"cutejax\.(fa4_fwd|maxattn_forward)",
    "cudnn": r"custom_call_target=\"__cudnn\$fmhaSoftmax\"",
}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", FORWARD)
def test_attention_runs_forward_once_a_layer(kernel: str) -> None:
    skip_unless_available(kernel)
    config = ma.AttentionConfig(attention=kernel, remat_policy="SAVE_ATTENTION")  # type: ignore[arg-type]

    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        q = (x @ w).reshape(1, 512, 2, 64)
        return x + ma.attention(q, q, q, config=config).reshape(x.shape) @ w

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        kept = ma.remat(block, config)
        return jax.lax.scan(lambda x, w: (kept(w, x), None), x, ws)[0].astype(jnp.float32).sum()

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((4, 128, 128), (1, 512, 128))]
    program = nnx.jit(jax.grad(loss)).lower(*shapes).compile().as_text() or ""
    assert len(re.findall(FORWARD[kernel], program)) == 1


@pytest.mark.parametrize(("device", "barriers"), [("NVIDIA H200", 1), ("cpu", 0)])
def test_only_a_gpus_plan_has_the_barrier(device: str, barriers: int) -> None:
    x: Any = jnp.ones((1, 8, 2, 4))
    config = ma.AttentionConfig(attention="dot_product")
    plan = ma.plan(ma.Call.of(x, x), config, target=ma.Target.named(device))
    grad = jax.make_jaxpr(jax.grad(lambda q: run(plan, q, q, q, None, M.Full())[0].sum()))
    assert str(grad(x)).count("optimization_barrier") == barriers
