"""A TPU's kernel is refused inside a `shard_map` that leaves an axis to the compiler, whatever the
size of the axis.
"""

from __future__ import annotations

import jax
import pytest

from maxattn.attention import run
from maxattn.config import AttentionConfig
from maxattn.masks import Full
from maxattn.plan import Call, Target, plan


@pytest.mark.parametrize("strategy", ["ring", "ulysses", "all_gather"])
def test_flash_lowers_for_a_tpu_on_a_mesh_with_axes_of_one_device(strategy):
    config = AttentionConfig(
        attention="flash", context_parallel=strategy, ici_context_parallelism=4
    )
    mesh = config.make_mesh(jax.devices()[:4])
    assert mesh.axis_names == ("data", "fsdp", "context", "tensor")
    q = jax.ShapeDtypeStruct((1, 1024, 4, 128), "bfloat16")
    decided = plan(Call.of(q, q), config, mesh, Target.named("TPU v5p"))
    mask = Full().bind(1024, 1024, 1, 4)
    traced = jax.jit(lambda q, k, v: run(decided, q, k, v, None, mask, mesh)[0]).trace(q, q, q)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
