"""Compile a block of a streaming Wan for an absent H200, and list the arrays it writes.

Needs jax's CUDA plugin, and no GPU or driver. Usage: `python -m tests.gpu.programs_child scan`, or
`apart`. Prints a JSON list of the program's instructions that write to memory, also inside loops,
each with its name, operation, dtype and shape.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from maxattn_examples.common.compiled import FOR_SAMPLING, split
from maxattn_examples.stream import Denoising, Rollout
from maxattn_examples.wan.model import WanTransformer3D
from maxattn_examples.wan.settings import Sizes

import maxattn as ma

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 19 patch: 0 }
runtime_version { major: 13 } device_description_str: "NVIDIA H200"
"""
TARGET = ma.Target.named("NVIDIA H200", (("jax", jax.__version__),))
SIZES = Sizes(
    num_attention_heads=2, attention_head_dim=128, num_layers=3, ffn_dim=1024, text_dim=64
)
SIDES, STREAM = (32, 64, 16), ma.Stream(tokens_per_frame=512, frames_per_block=3, window=3)
NO_TIMING = {"xla_gpu_autotune_level": 0}  # there is no GPU to time products on


def program(scan: bool) -> str:
    """Compile the program of a block with a full window."""
    dtype = jnp.bfloat16
    how: dict[str, Any] = {"dtype": dtype, "param_dtype": dtype, "scan_layers": scan}
    model = nnx.eval_shape(lambda: WanTransformer3D(SIZES, **how, rngs=nnx.Rngs(0)))
    run = Rollout(model, STREAM, SIDES, Denoising(denoising_steps=(1000, 500)))
    frame = jax.ShapeDtypeStruct((), jnp.int32)
    cache = replace(jax.eval_shape(lambda: model.cache(STREAM)), frame=frame, stage="full", own=3)
    structure, parameters = split(model)
    text = jax.ShapeDtypeStruct((1, 512, SIZES.text_dim), dtype)
    told = jax.eval_shape(lambda p, x: structure.merge(p).encode(x), parameters, text)

    def block(parameters: Any, cache: Any, told: Any, frame: Any) -> Any:
        return run._make_block(parameters, cache, told, frame, 1)

    described: dict[str, Any] = {"topology": "1x1x1", "target_config": H200}
    gpu = topologies.get_topology_desc("", "cuda", **described).devices[0]
    where = SingleDeviceSharding(gpu)
    jitted = jax.jit(block, in_shardings=where, out_shardings=where, donate_argnums=1)
    traced = jitted.trace(parameters, cache, told, frame)
    options = NO_TIMING | ({} if scan else FOR_SAMPLING["gpu"])
    return traced.lower(lowering_platforms=("cuda",)).compile(options).as_text() or ""


def written(text: str) -> Iterator[dict[str, Any]]:
    """Yield the instructions outside of fusions that write an array."""
    inside = False
    for line in text.splitlines():
        if (begun := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)) is not None:
            inside = "fused" in begun[1] or "computation" in begun[1]
        made = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = \(?(\w+)\[([\d,]+)\].*? ([a-z][\w-]*)\(", line)
        if made is not None and not inside:
            shape = [int(n) for n in made[3].split(",")]
            yield {"name": made[1], "dtype": made[2], "shape": shape, "operation": made[4]}


if __name__ == "__main__":
    with TARGET.assumed():
        found = list(written(program(sys.argv[1] == "scan")))
    print(json.dumps(found), flush=True)
    os._exit(0)  # the plugin's threads wait for a GPU
