"""`maxattn explain --stream`: golden texts; its numbers equal those of caches and programs."""

from __future__ import annotations

from dataclasses import replace
from shlex import split
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import maxattn as ma
from maxattn.sharding import mesh_shape
from maxattn.streaming.attend import How, Projected, attend_with_cache
from maxattn.target import Target
from maxattn.tools.cli.stream import read_stream
from maxattn.tools.compile.hlo import transfers
from maxattn.tools.model_shapes import SHAPES
from maxattn.tools.stream_costs import forward_time
from maxattn.tuned.kernels import CallTimes, key_of_kernels
from tests.golden_text import check_golden
from tests.tools.cli.command import run

H200, FA4 = ["--target", "NVIDIA H200"], ["--with", "fa4-jax=0.1.0"]
OWN = "tokens=256,heads=8,kv_heads=2,head_dim=64,layers=6"
GOOD = {
    "window_21": ["--stream", "wan-1.3b-480p,frames=3,window=7,sink=0", *H200, *FA4],
    "window_12_sink_3": ["--stream", "wan-1.3b-480p,frames=3,window=4,sink=3", *H200, *FA4],
    "frame_by_frame": ["--stream", "wan-14b-720p,window=6,steps=2", "--target", "GB200"],
    "whole_video": [
        "--stream", "wan-5b-720p,frames=5,first_frame_alone,length=31,clean_pass=false", *H200,
    ],
    "one_block": ["--stream", f"{OWN},frames=4,length=4", "--target", "cpu", "--dtype", "f32"],
    "own_sizes_over_a_mesh": [
        "--stream", f"{OWN},frames=4,window=3,sink=5,context=tokens", "--target", "TPU v5p",
        "--mesh", "data=2,context=4,tensor=2", "--batch", "2",
    ],
    "heads_over_context": split(
        "--stream wan-1.3b-480p,frames=3,window=7 --target v6e --mesh context=4"
    ),
    "of_a_file": ["configs/wan_1_3b_stream.yml", "--stream", "wan-1.3b-480p", *H200],
    "of_a_file_but_all": [
        "configs/wan_1_3b_stream.yml", "--stream", "wan-1.3b-480p,window=all,length=81", *H200,
    ],
}  # fmt: skip
WAN = "wan-1.3b-480p,frames=3"
BAD = {
    "nothing": ["--stream", ""],
    "model": ["--stream", "wan-1.3b-48p,frames=3,window=7"],
    "key": ["--stream", f"{WAN},windo=7"],
    "key_without_value": ["--stream", f"{WAN},window"],
    "key_twice": ["--stream", f"{WAN},window=7,window=4"],
    "number": ["--stream", f"{WAN},window=seven"],
    "flag": ["--stream", f"{WAN},window=7,first_frame_alone=yes"],
    "layout": ["--stream", f"{WAN},window=7,context=head"],
    "size_missing": ["--stream", "tokens=256,heads=8,frames=3,window=7"],
    "kv_heads": ["--stream", f"{WAN},window=7,kv_heads=5"],
    "no_room": ["--stream", f"{WAN},window=2,sink=4"],
    "sink_without_window": ["--stream", f"{WAN},sink=3,length=21"],
    "no_window_no_length": ["--stream", WAN],
    "length": ["--stream", f"{WAN},window=7,length=20"],
    "length_first_alone": ["--stream", f"{WAN},window=7,first_frame_alone,length=21"],
    "heads_over_mesh": ["--stream", f"{WAN},window=7", "--mesh", "context=8"],
    "tokens_over_mesh": ["--stream", f"{WAN},window=7,context=tokens", "--mesh", "context=7"],
    "batch_over_mesh": ["--stream", f"{WAN},window=7", "--mesh", "data=2"],
    "batch": ["--stream", f"{WAN},window=7", "--batch", "0"],
    "dtype": ["--stream", f"{WAN},window=7", "--dtype", "fp8"],
    "beside_a_shape": ["--stream", f"{WAN},window=7", "--shape", "wan-1.3b-480p"],
    "beside_a_mask": ["--stream", f"{WAN},window=7", "--mask", "causal"],
    "section": ["rollout.window=0", "--stream", "wan-1.3b-480p"],
}


@pytest.mark.parametrize("name", GOOD)
def test_text(capsys: Any, name: str) -> None:
    ran = run(capsys, "explain", *GOOD[name])
    assert (ran.status, ran.err) == (0, "")
    check_golden(f"cli/explain_stream/{name}", ran.out)


@pytest.mark.parametrize("name", BAD)
def test_refused(capsys: Any, name: str) -> None:
    file = ["configs/wan_1_3b_stream.yml"] if name == "section" else []
    ran = run(capsys, "explain", *file, *BAD[name], *([] if "--target" in BAD[name] else H200))
    assert (ran.status, ran.out) == (1, "")
    check_golden(f"cli/explain_stream_refused/{name}", ran.err)


# ---- numbers -------------------------------------------------------------------------------------

STREAMS = {
    "window": "frames=3,window=3",
    "sink": "frames=3,window=3,sink=4",
    "alone": "frames=3,window=3,first_frame_alone",
    "alone_and_whole": "frames=3,first_frame_alone,length=13",
    "one_block": "frames=3,window=1",
    "video": "frames=2,length=10",
}
SIZES = "tokens=8,heads=4,head_dim=8,layers=2"


@pytest.mark.parametrize("name", STREAMS)
def test_programs_and_lengths_are_those_of_a_cache(name: str) -> None:
    """For each block: the stage of the cache, and the number of filled slots."""
    made = read_stream(f"{SIZES},{STREAMS[name]}", {}, (), 1, "float32")
    slots = {} if made.layout.stream.window else {"frames": made.layout.frames}
    stream = made.layout.stream
    cache = stream.cache(layers=2, batch=1, kv_heads=4, dim_head=8, dtype="float32", **slots)
    assert made.cache_bytes == cache.nbytes
    stages = {"empty": "first block", "filling": "filling cache", "full": "full cache"}
    for block in range(1, (made.blocks or 8) + 1):
        of = [s for s in made.stages() if s.blocks[0] <= block <= (s.blocks[1] or block)]
        assert [s.name for s in of] == [stages[cache.stage]]
        filled = min(int(cache.frame) + cache.own, cache.layout.frames) * stream.tokens_per_frame
        assert of[0].call.q_len == cache.tokens
        assert of[0].keys[0] <= filled <= of[0].keys[1]
        if block in of[0].blocks:
            assert filled == of[0].keys[of[0].blocks.index(block)]
        cache = replace(cache).advance()  # as if a pass had written to it


def test_what_tune_measured_comes_before_estimates() -> None:
    """Over a mesh, and for kernels of plain JAX, there are no measurements."""
    target = Target.named("NVIDIA H200", (("fa4-jax", "0.1.0"),))
    config, call = ma.AttentionConfig(), SHAPES["wan-1.3b-480p-block"].call()
    estimated = forward_time(ma.plan(call, config, target=target), config)
    assert estimated is not None and estimated.how.startswith("estimated, not run")
    fast, slow = estimated.seconds
    assert 1.1e-3 < fast == slow < 1.7e-3  # 1.38 ms was measured
    rounds = (("flash", (1.3, 1.4, 1.5)),)
    times = CallTimes(key_of_kernels(call), "", target.packages, rounds)
    tuned = replace(target, kernel_times=(times,))
    found = forward_time(ma.plan(call, config, target=tuned), config)
    assert found == ((0.0014, 0.0014), "measured here by maxattn tune")
    assert forward_time(ma.plan(call, config, {"context": 4}, target), config) is None
    plain = ma.AttentionConfig(use_memory_efficient_attention=True, attention="dot_product")
    assert forward_time(ma.plan(call, plain, target=target), plain) is None


MESHES = [("heads", {"context": 4}, 8), ("tokens", {"context": 4}, 4), ("heads", {"tensor": 4}, 4)]


@pytest.mark.parametrize(("context", "axes", "kv_heads"), MESHES)
def test_what_moves_is_what_the_compiled_pass_sends(
    context: str, axes: dict[str, int], kv_heads: int
) -> None:
    config = ma.AttentionConfig(
        ici_data_parallelism=1, **{f"ici_{axis}_parallelism": n for axis, n in axes.items()}
    )
    mesh = config.make_mesh(jax.devices()[:4])
    text = f"tokens=16,heads=8,kv_heads={kv_heads},head_dim=32,layers=2,frames=3,window=3"
    made = read_stream(f"{text},context={context}", {}, mesh_shape(mesh), 2, "float32")
    cache = made.layout.stream.cache(
        layers=2, batch=2, kv_heads=kv_heads, dim_head=32, dtype="float32", mesh=mesh,
        context=context,
    )  # fmt: skip
    shard = cache.k.addressable_shards[0].data
    assert made.cache_bytes == 2 * shard.nbytes
    sent = [x for x in _compiled(mesh, cache, kv_heads) if x.kind != "psum"]  # of the LSE
    assert sum(x.bytes for x in sent) == sum(move.bytes for move in made.moves())
    assert {x.kind for x in sent} == {move.kind for move in made.moves()}


def _compiled(mesh: Any, cache: ma.KVCache, kv_heads: int) -> Any:
    """Compile a layer's attention over a full cache, and list its transfers."""
    cache = replace(cache, stage="full", frame=cache.frame + 9)
    axes = dict(mesh_shape(mesh))
    spec = PartitionSpec(None, *(axis if axis in axes else None for axis in ("context", "tensor")))
    tokens = NamedSharding(mesh, spec)

    def attend(q: Any, k: Any, v: Any, cache: ma.KVCache) -> Any:
        how = How(None, ma.AttentionConfig(), mesh)
        out, cache = attend_with_cache(cache.layer(0), Projected(q, k, v), how)
        return jax.lax.with_sharding_constraint(out, tokens), cache

    q, k = (jax.device_put(jnp.ones((2, 48, heads, 32)), tokens) for heads in (8, kv_heads))
    compiled = jax.jit(attend, donate_argnums=3).lower(q, k, k, cache).compile()
    return transfers(compiled.as_text() or "")
