"""Programs for absent TPUs: kernels lower on a mesh, and hops overlap with kernels."""

from __future__ import annotations

from typing import Any

import jax
import pytest

import maxattn as ma
from maxattn._attention import run
from maxattn.masks import Causal, Full, Mask
from maxattn.tools.compile.job import CompileJob, Outcome, run_in_child
from maxattn.tools.compile.process import tpu_python
from maxattn.tools.model_shapes import Shape

needs_tpu_compiler = pytest.mark.skipif(
    tpu_python() is None, reason="libtpu is not installed, and MAXATTN_TPU_PYTHON names no python"
)


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "all_gather"])
def test_flash_lowers_for_a_tpu_on_a_mesh_with_axes_of_one_device(strategy: str) -> None:
    """Mosaic kernels are refused in a `shard_map` that leaves an axis Auto."""
    config = ma.AttentionConfig(
        attention="flash", context_parallel=strategy, ici_context_parallelism=4
    )
    mesh = config.make_mesh(jax.devices()[:4])
    assert mesh.axis_names == ("data", "fsdp", "context", "tensor")
    q = jax.ShapeDtypeStruct((1, 1024, 4, 128), "bfloat16")
    decided = ma.plan(ma.Call.of(q, q), config, mesh, ma.Target.named("TPU v5p"))
    mask = Full().bind(1024, 1024, 1, 4)
    traced = jax.jit(lambda q, k, v: run(decided, q, k, v, None, mask, mesh)[0]).trace(q, q, q)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize(("topology", "n"), [("v5p:2x2x1", 4), ("v6e:2x4", 8)])
@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_hops_run_beside_kernels(topology: str, n: int, mask: Mask, training: bool) -> None:
    outcome = compiled(topology, n, mask, training)
    # K and V: n-1 hops of each; backward again, and n of their gradients, the last one beside half
    # of the local keys. Zig-zag has two chunks of each.
    chunks = 2 if "zig-zag x" in outcome.plan else 1
    assert chunks == (1 if mask.is_full else 2)
    sent = [t for t in outcome.found if t["kind"] == "ppermute"]
    beside = [t for t in sent if t["kernels"]]
    if mask.is_full:
        # The first hop of the backward can be the forward's: K and V are then kept.
        forward, backward = 2 * (n - 1), 2 * (n - 1) + 2 * n if training else 0
        assert forward + backward - (2 if training else 0) <= len(sent) <= forward + backward
        assert len(beside) == len(sent)
    else:
        # Of operands this small the compiler sends the first hop along with those that are dealt
        # out, before a kernel.
        assert len(beside) >= 2 * chunks * ((n - 2) * 3 + 2 if training else n - 2)


@pytest.mark.slow
@needs_tpu_compiler
@pytest.mark.parametrize(("topology", "n"), [("v5p:2x2x1", 4), ("v6e:2x4", 8)])
@pytest.mark.parametrize("training", [False, True])
def test_transfers_both_ways_run_beside_kernels(topology: str, n: int, training: bool) -> None:
    sent = compiled(topology, n, Full(), training, ring_direction="both_ways").found
    assert len(sent) >= 4 * (n - 1) and all(t["kernels"] for t in sent)
    ways = [{(b - a) % n for a, b in t["groups"]} for t in sent]
    assert ways.count({1}) == ways.count({n - 1}) == len(sent) // 2


def compiled(topology: str, n: int, mask: Mask, training: bool, **more: Any) -> Outcome:
    config = ma.AttentionConfig(
        attention="ring", attention_kernel="flash", ici_context_parallelism=n, **more
    )
    shape = Shape("", 1, 8192 * n, 8192 * n, 4, 128, mask=mask)
    outcome = run_in_child(CompileJob(topology, config, shape, training), 900)
    assert outcome.ending == "compiled", outcome.message
    return outcome
