"""Compile splash attention for a TPU that is not there. Run as a child process: cases as JSON in, results as JSON out.

Needs jax[tpu]; imports nothing of maxattn, so that any environment with libtpu can run it.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

HEADS = 2


def compile_case(case: dict) -> dict:
    """Compile one case, and say whether it compiles.

    Args:
        case: topology, sizes (as BlockSizes.given()), head_dim, dtype, training.
    """
    started = time.time()
    try:
        lower(case).compile()
    except Exception as e:
        text = f"{type(e).__name__}: {e}"
        # A kernel that needs too much VMEM says how much at the end, after its whole signature.
        return {"ok": False, "seconds": time.time() - started, "message": text[:500] + " ... " + text[-500:]}
    return {"ok": True, "seconds": time.time() - started, "message": ""}


def lower(case: dict) -> jax.stages.Lowered:
    """Lower attention of two blocks by two blocks with a window and segment ids, and its gradient."""
    sizes = splash.BlockSizes(**case["sizes"])
    t, s = 2 * sizes.block_q, 2 * sizes.block_kv
    mask = masks.MultiHeadMask([masks.LocalMask((t, s), (700, 300), 0)] * HEADS)
    kernel = splash.make_splash_mha(mask, block_sizes=sizes, head_shards=1, q_seq_shards=1)

    def forward(q, k, v, q_ids, kv_ids):
        return kernel(q, k, v, splash.SegmentIds(q_ids, kv_ids))

    def loss(*operands):
        return forward(*operands).astype(jnp.float32).sum()

    device = topologies.get_topology_desc(platform="tpu", topology_name=case["topology"]).devices[0]
    placed = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array([device]), "x"), jax.sharding.PartitionSpec())

    def spec(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

    q, k = (spec((HEADS, n, case["head_dim"]), case["dtype"]) for n in (t, s))
    function = jax.grad(loss, (0, 1, 2)) if case["training"] else forward
    precision = "highest" if case["dtype"] == "float32" else "default"
    with jax.default_matmul_precision(precision):
        traced = jax.jit(function).trace(q, k, k, spec((t,), "int32"), spec((s,), "int32"))
        return traced.lower(lowering_platforms=("tpu",))


for line in sys.stdin:
    print(json.dumps(compile_case(json.loads(line))), flush=True)
