"""Collectives parsed from compiled programs: a TPU compiler's, written ones, this machine's."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import maxattn as ma
from maxattn.tools.compile.hlo import Transfer, axes_of, transfers

TEXTS = Path(__file__).parents[1] / "fixtures" / "hlo"
MIB = 2**20

WRITTEN = """HloModule jit_f, is_scheduled=true

%wrapped_gather (p: bf16[8,16]) -> bf16[32,16] {
  ROOT %all-gather.1 = bf16[32,16]{1,0} all-gather(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}

%matmul (a: f32[8,8]) -> f32[8,8] {
  ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (s: (s32[], f32[4,4])) -> (s32[], f32[4,4]) {
  %x = f32[4,4]{1,0} get-tuple-element(%s), index=1
  %reduce-scatter.1 = f32[4,4]{1,0} reduce-scatter(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}
}

ENTRY %main (p: bf16[8,16]) -> f32[8,8] {
  %ag = ((bf16[8,16]{1,0}), bf16[32,16]{1,0}) async-start(%p), calls=%wrapped_gather
  %fusion.1 = f32[8,8]{1,0} fusion(%a), kind=kOutput, calls=%matmul
  %add.1 = f32[8,8]{1,0} fusion(%a), kind=kLoop
  %index = s32[2]{0} custom-call(%a), custom_call_target="AssumeGatherIndicesInBound"
  %ag.done = bf16[32,16]{1,0} async-done(%ag), metadata={op_name="jit(f)/transpose(jvp(g))/all_gather"}
  %loop = (s32[], f32[4,4]{1,0}) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %all-reduce.1 = (f32[], pred[8]{0}) all-reduce(%b, %d), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}
"""


def read(name: str) -> tuple[Transfer, ...]:
    return transfers((TEXTS / f"{name}.txt").read_text())


def test_a_written_program():
    by_kind = {t.kind: t for t in transfers(WRITTEN)}
    gather, scatter, psum = by_kind["all_gather"], by_kind["psum_scatter"], by_kind["psum"]
    assert gather.is_async and gather.is_overlapped and gather.kernels == ("fusion.1",)
    assert gather.groups == ((0, 2, 4, 6), (1, 3, 5, 7)) and gather.bytes == 32 * 16 * 2 * 3 // 4
    assert "transpose(" in gather.op_name and not psum.op_name
    assert (scatter.times, scatter.bytes) == (3, 4 * 4 * 4)
    assert (psum.is_async, psum.bytes, psum.start) == (False, 4 + 8, psum.done)


def test_axes():
    sizes = {"data": 2, "fsdp": 1, "context": 2, "tensor": 2}
    assert {t.kind: axes_of(t, sizes) for t in transfers(WRITTEN)} == {
        "all_gather": ("data", "context"),
        "psum_scatter": ("tensor",),
        "psum": ("data", "context", "tensor"),
    }


def test_groups_along_axes_of_a_mesh():
    """jax 0.12 prints the mesh itself."""
    mesh = "mesh['data'=1,'fsdp'=2,'context'=2,'tensor'=2] {'context'}"
    how = f"replica_groups={mesh}, dimensions={{1}}"
    text = WRITTEN.replace("replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", how)
    assert text != WRITTEN
    found = next(t for t in transfers(text) if t.kind == "all_gather")
    assert found.groups == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert axes_of(found, {"data": 1, "fsdp": 2, "context": 2, "tensor": 2}) == ("context",)


def test_no_groups_are_all_devices():
    text = (
        "HloModule f, is_scheduled=true, num_partitions=4\n\nENTRY %main (p: f32[8]) -> f32[8] {\n"
    )
    text += "  ROOT %ag = f32[8]{0} all-gather(%p), channel_id=1, replica_groups={}, dimensions={0}\n}\n"
    (found,) = transfers(text)
    assert (found.groups, found.bytes) == (((0, 1, 2, 3),), 24)
    assert axes_of(found, {"data": 2, "fsdp": 1, "context": 2}) == ("data", "context")


def test_a_ring_on_a_tpu():
    found = read("ring_training_v5p")
    assert {t.kind for t in found} == {"ppermute"} and all(t.is_async for t in found)
    assert all(t.groups == ((0, 1), (1, 2), (2, 3), (3, 0)) for t in found)
    forward = [t for t in found if "transpose(" not in t.op_name]
    backward = [t for t in found if "transpose(" in t.op_name]
    assert [t.bytes for t in forward] == [4 * MIB] * 6
    assert [t.bytes for t in backward] == [8 * MIB] * 6 + [4 * MIB] * 2
    assert not any(t.is_overlapped for t in forward) and all(t.is_overlapped for t in backward)
    assert backward[0].kernels == ("splash_mha_dkv_no_residuals.5",)


def test_gathered_keys_on_a_tpu():
    found = read("all_gather_training_v5p")
    assert [(t.kind, t.is_async, t.bytes) for t in found] == [
        ("all_gather", False, 12 * MIB), ("all_gather", False, 12 * MIB), ("psum", False, 32 * MIB),
    ]  # fmt: skip
    sizes = {"data": 1, "fsdp": 1, "context": 4, "tensor": 1}
    assert {axes_of(t, sizes) for t in found} == {("context",)}


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_what_this_machine_compiles_is_what_the_plan_names(strategy):
    config = ma.AttentionConfig(
        attention="dot_product", context_parallel=strategy, ici_context_parallelism=4
    )
    mesh = config.make_mesh(jax.devices()[:4])
    q = jax.ShapeDtypeStruct((1, 64, 4, 8), jnp.float32)
    plan = ma.plan(ma.Call.of(q, q), config, mesh)
    both = jax.jit(lambda q, k, v: ma.attention(q, k, v, config=config, mesh=mesh, return_lse=True))
    found = transfers(both.lower(q, q, q).compile().as_text())
    named = [c for c in plan.collectives if c.when == "forward"]
    assert {t.kind for t in found} == {c.kind for c in named}
    assert {axes_of(t, dict(mesh.shape)) for t in found} == {("context",)}
    assert sum(t.bytes * t.times for t in found) == sum(c.bytes for c in named)
