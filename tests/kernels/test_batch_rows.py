"""Masks of equal blocks that attend only to themselves, computed as batch rows.

Results against float64 on one device and on meshes, the calls that qualify, plans, and that masked
pairs are not computed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import maxattn as ma
from maxattn import masks as M
from maxattn._attention import run
from maxattn.errors import Unsupported
from maxattn.kernels import as_batch_rows, build, computed_call
from maxattn.kernels.composed.batch_rows import BatchRows
from maxattn.tools.cli.check import advice
from maxattn.tools.memory import estimate
from maxattn.tools.tune.candidates import kernel_candidates
from tests.cases import draw_operands, judge_call
from tests.golden_text import check_golden, check_refused
from tests.waiting import but

T = 96
SEGMENTS = M.Segments.of_lengths((24,) * 4)
CASES: dict[str, tuple[M.Mask, int]] = {  # mask, keys
    "segments": (SEGMENTS, T),
    "longer segments": (M.Segments.of_lengths((48, 48)), T),
    "texts": (M.Segments.of_lengths((24,) * 4, (7,) * 4), 28),
    "frames": (M.VideoMask(8, 12, frames_per_block=2, window=1), T),
    "causal": (SEGMENTS & M.Causal(), T),
    "window": (M.BlockSlidingWindow(48, 1) & M.LocalWindow(5, 2), T),
}
KERNELS = {
    "dot_product": ma.AttentionConfig(attention="dot_product"),
    "memory_efficient": ma.AttentionConfig(
        use_memory_efficient_attention=True, query_chunk_size=10, key_chunk_size=10
    ),
    "flash": ma.AttentionConfig(attention="flash"),
    "tokamax_flash": ma.AttentionConfig(attention="tokamax_flash"),
    "tpu_flash": ma.AttentionConfig(attention="tpu_flash"),
}
PACKAGES = (("tokamax", "0.0.17"), ("transformer-engine-jax", "2.20.2"), ("fa4-jax", "0.1.0"))
H200 = ma.Target("gpu", "NVIDIA H200", PACKAGES)
PACKED = ma.Call(1, 8192, 8192, 12, 12, 128, "bfloat16", M.Segments.of_lengths((1024,) * 8))


def arrays(keys: int = T, **sizes: int) -> dict[str, Any]:
    return draw_operands(**{"b": 2, "t": T, "s": keys, "n": 4, "k": 2, "h": 8} | sizes)


# The masks are cut before a kernel sees them: flash runs all, the others one.
@pytest.mark.parametrize(
    ("kernel", "name"),
    but(product(KERNELS, CASES), lambda case: (case[1] == "window") != (case[0] == "flash")),
)
def test_against_float64(kernel: str, name: str) -> None:
    mask, keys = CASES[name]
    x, config = arrays(keys), KERNELS[kernel]
    call = ma.Call.of(x["q"], x["k"], mask)
    plan = ma.plan(call, config)
    is_short = T // 4 < 48 and name != "longer segments" and name != "window"
    tiled = kernel not in ("dot_product", "memory_efficient")  # tiles hold short blocks
    assert isinstance(plan.kernel, BatchRows) == (not (tiled and is_short))
    assert plan.kernel.name == kernel
    judge_call(partial(ma.attention, mask=mask, config=config, return_lse=True), x, mask)


@pytest.mark.parametrize("kernel", ["dot_product", "flash"])
def test_values_of_another_head_dim(kernel: str) -> None:
    """Kernels with a single head dim pad the heads."""
    mask, config = CASES["window"][0], KERNELS[kernel]
    call = partial(ma.attention, mask=mask, config=config, return_lse=True)
    judge_call(call, arrays(v=12), mask)


@pytest.mark.parametrize("strategy", ["ulysses", "ring", "all_gather", "ulysses_ring"])
def test_on_a_mesh(strategy: str) -> None:
    """Ulysses has whole sequences, and computes batch rows; elsewhere a shard may cut a block."""
    mask = SEGMENTS & M.Causal()
    x = arrays(k=4)
    config = ma.AttentionConfig(
        attention="dot_product", context_parallel=strategy, ici_data_parallelism=2,
        ici_context_parallelism=4, ulysses_shards=4 if strategy == "ulysses" else 2,
    )  # fmt: skip
    mesh = config.make_mesh(jax.devices()[:8])
    bound = mask.bind(T, T, 2, 4)
    plan = ma.plan(ma.Call.of(x["q"], x["k"], bound, return_lse=True), config, mesh)
    assert not plan.fell_back
    assert isinstance(plan.kernel, BatchRows) == (strategy == "ulysses")
    judge_call(partial(run, plan, bias=None, mask=bound, mesh=mesh), x, mask)


def test_second_derivatives_and_vmap() -> None:
    """Plain JAX is differentiated twice through the rows as without them."""
    x = arrays()
    dense = np.asarray(SEGMENTS.bind(T, T).allowed(np.arange(T), np.arange(T)))
    config, two = KERNELS["dot_product"], np.stack([x["q"], x["q"][::-1]])

    def penalty(q: jax.Array, mask: Any) -> jax.Array:
        def energy(q: jax.Array) -> jax.Array:
            return (ma.attention(q, x["k"], x["v"], mask=mask, config=config) ** 2).sum()

        return (jax.grad(energy)(q) ** 2).sum()

    found, want = (
        jax.jit(jax.vmap(jax.grad(partial(penalty, mask=m))))(two) for m in (SEGMENTS, dense)
    )
    np.testing.assert_allclose(found, want, atol=1e-4 * float(jnp.abs(want).max()))


def test_pairs_that_the_mask_forbids_are_not_computed() -> None:
    """The program has scores only within blocks."""
    x = jax.ShapeDtypeStruct((1, 1024, 2, 16), jnp.float32)

    def flops(mask: M.Mask) -> float:
        call = partial(ma.attention, mask=mask, config=KERNELS["dot_product"])
        costs = jax.jit(call).lower(x, x, x).cost_analysis()
        assert costs is not None
        return costs["flops"]

    assert flops(M.Segments.of_lengths((64,) * 16)) < flops(M.Full()) / 12


# ---- which calls ---------------------------------------------------------------------------------


def test_calls_that_stay_as_they_are() -> None:
    """A bias, and shards with traced positions, prevent batch rows."""
    x = jnp.ones((2, T, 4, 8))
    call = ma.Call.of(x, x, SEGMENTS)
    assert as_batch_rows(call).shape_text == "B=8 T=S=24 N=4 H=8 f32"
    assert as_batch_rows(as_batch_rows(call)) is as_batch_rows(call)
    ids = M.Segments(np.zeros((2, T), int), np.zeros((2, T), int))
    others = [call.derived(sharded=True), call.derived(mask=M.Full()), ma.Call.of(x, x, ids)]
    for other in (*others, ma.Call.of(x, x, SEGMENTS, bias=jnp.ones((1, 1, T, T)))):
        assert as_batch_rows(other) is other


@pytest.mark.parametrize(
    ("kernel", "platform", "tokens", "as_rows"),
    [("dot_product", "gpu", 16, True), ("cudnn", "gpu", 16, True), ("flash", "gpu", 32, False),
     ("flash", "gpu", 64, True), ("dot_product", "tpu", 16, True), ("flash", "tpu", 1560, False),
     ("tpu_flash", "tpu", 1024, False)],
)  # fmt: skip
def test_blocks_that_fill_tiles_are_rows(kernel: str, platform: Any, tokens: int, as_rows: bool):
    """Several short blocks fit into one tile, and on a TPU batch rows would be padded to tiles."""
    mask = M.Segments.of_lengths((tokens,) * 8).bind(8 * tokens, 8 * tokens)
    call = ma.Call(1, 8 * tokens, 8 * tokens, 4, 4, 64, "bfloat16", mask)
    assert (computed_call(kernel, call, platform) is not call) is as_rows


@pytest.mark.parametrize("kernel", ["cudnn", "cudnn_flash_te", "flash", "tokamax_flash"])
def test_kernels_of_a_gpu_take_blocks_as_rows(kernel: str) -> None:
    """cuDNN does not support such a mask, but needs none for batch rows."""
    plan = ma.plan(PACKED, ma.AttentionConfig(attention=kernel), target=H200)
    assert plan.kernel.name == kernel and isinstance(plan.kernel, BatchRows)
    assert "8 blocks of 1024 tokens as rows of the batch" in plan.explain()


def test_blocks_are_planned_as_rows() -> None:
    """Their kernel, its time and the plan's values are those of rows."""
    rows, flash = ma.Call(8, 1024, 1024, 12, 12, 128, "bfloat16"), KERNELS["flash"]
    packed, batch = (ma.plan(call, target=H200) for call in (PACKED, rows))
    assert packed.because == batch.because and packed.kernel.name == batch.kernel.name
    times = [plan.kernel.microseconds(plan.call, H200) for plan in (packed, batch)]
    assert times[0] == times[1] and times[0] is not None
    values, of_rows = (ma.plan(call, flash, target=H200).to_dict() for call in (PACKED, rows))
    more = {key: value for key, value in values.items() if key not in of_rows}
    assert more == {"kernel.count": 8, "kernel.mask": "Full()"}
    changed = {key for key in of_rows if of_rows[key] != values[key]}
    assert changed == {"call", "mask", "q_len", "kv_len"}


def test_the_scores_of_rows_are_counted() -> None:
    """They count in the time and memory of plain JAX, and in its warning."""
    mask = M.BlockSlidingWindow(16, 1)
    call = ma.Call(1, 32768, 32768, 12, 12, 128, "bfloat16", mask)
    rows = ma.Call(2048, 16, 16, 12, 12, 128, "bfloat16")

    def scores_of(plan: ma.Plan, training: bool) -> int:
        return {part.what: part.bytes for part in estimate(plan, training)}["scores T x S"]

    for target in (H200, ma.Target.named("cpu")):
        assert "dot_product" in kernel_candidates(call, ma.AttentionConfig(), target).built
        packed, batch = (ma.plan(x, KERNELS["dot_product"], target=target) for x in (call, rows))
        for training in (True, False):
            assert scores_of(packed, training) == scores_of(batch, training)
        # A backward alone may be dense.
        pair = build("memory_efficient/dot_product", packed.call, ma.AttentionConfig(), target)
        assert scores_of(replace(packed, kernel=pair), True) == scores_of(packed, True)
        assert not advice(packed, KERNELS["dot_product"], training=True)


def test_no_more_rows_than_a_launch_has() -> None:
    call = ma.Call(1, 16 * 65535, 16 * 65535, 1, 1, 8, mask=M.BlockSlidingWindow(16, 1))
    assert as_batch_rows(call).batch == 65535
    twice = replace(call, batch=2)
    assert as_batch_rows(twice) is twice


# ---- what is said --------------------------------------------------------------------------------


FRAMES = ma.Call(1, 32760, 32760, 12, 12, 128, "bfloat16", M.BlockSlidingWindow(1560, 1))
TEXTS = M.Segments.of_lengths((4096,) * 8, (77,) * 8)
EXPLAINED = {
    "cpu": (FRAMES, ma.Target.named("cpu")),
    "NVIDIA_H200": (FRAMES, H200),
    "TPU_v6e": (FRAMES, ma.Target.named("TPU v6e")),
    "texts": (ma.Call(1, 32768, 616, 12, 12, 128, "bfloat16", TEXTS, role="cross"), H200),
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_explain(name: str) -> None:
    call, target = EXPLAINED[name]
    check_golden(f"batch_rows/{name}", ma.plan(call, target=target).explain())


def test_a_refusal_says_what_is_computed() -> None:
    call, config = PACKED.derived(head_dim=512), ma.AttentionConfig(attention="cudnn")
    plan = partial(ma.plan, call, config, target=H200)
    check_refused("batch_rows/refused", Unsupported, plan)
