"""`maxattn explain`: print a plan for each shape, or the costs of a stream.

A stream's report lists its cache, passes, FLOPs, times, transfers and plans.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import prod

from maxattn._plan import Plan
from maxattn.block_sizes.estimated.choose import in_ms
from maxattn.block_sizes.estimated.step_cost import Seconds
from maxattn.config import AttentionConfig
from maxattn.context_parallel.base import readable
from maxattn.decide import plan
from maxattn.devices import memory_of
from maxattn.errors import InputError
from maxattn.explain import explain
from maxattn.sharding import mesh_shape
from maxattn.target import Target
from maxattn.tools.cli.inputs import Source, mesh_of, read_batch, read_source, shapes_of, target_of
from maxattn.tools.cli.stream import OPTION, read_stream
from maxattn.tools.model_shapes import dtype_of
from maxattn.tools.stream_costs import Predicted, StreamCosts, StreamStage, forward_time

INDENT = 10
REST = (
    "times are of self-attention only, without projections, feed-forward, cross-attention, norms,"
    " rotary embedding, cache writes, text encoder and VAE"
)


def run(args: argparse.Namespace) -> int:
    """Print the plans."""
    source = read_source(args)
    if args.stream is not None:
        print(_stream_text(args, source))
        return 0
    found = shapes_of(args, source)
    mesh, target = mesh_of(args, source.config), target_of(args, source.config)
    plans = [plan(shape.call(), source.config, mesh, target) for shape in found]
    print("\n\n".join(made.explain(why=args.why) for made in plans))
    return 0


def _stream_text(args: argparse.Namespace, source: Source) -> str:
    for name in ("shape", "role", "mask"):
        if value := getattr(args, name):
            rule = "a stream determines shape, role and mask"
            text = ", ".join(value) if isinstance(value, list) else value
            raise InputError(f"--{name}", text, rule, f"leave --{name} out, or {OPTION}")
    mesh, target = mesh_shape(mesh_of(args, source.config)), target_of(args, source.config)
    batch, dtype = read_batch(args.batch) or 1, dtype_of(args.dtype or "bf16")
    run = read_stream(args.stream, source.sections, mesh, batch, dtype)
    stages = [
        (stage, plan(stage.call, source.config, dict(stage.mesh), target)) for stage in run.stages()
    ]
    model, sizes = run.model, " ".join(f"{axis}={size}" for axis, size in run.layout.mesh)
    shared = f", {run.kv_heads} KV heads" if run.kv_heads != model.heads else ""
    heads = f"{model.layers} layers of {model.heads} heads of {model.head_dim}{shared}"
    tokens = f"{model.tokens_per_frame} tokens a frame, {run.dtype}"
    over = f"   mesh {sizes}" if sizes else ""
    head = f"{run.name}  B={run.batch}, {heads}, {tokens}{over}   {target.device_kind}"
    lines = _stream_lines(run, stages, source.config, target)
    rows = (f"  {heading:<{INDENT}}{text}" for heading, text in lines)
    plans = (f"{stage.name}\n{explain(made, False, args.why)}" for stage, made in stages)
    return "\n\n".join(("\n".join((head, *rows)), *plans))


def _stream_lines(
    run: StreamCosts,
    stages: list[tuple[StreamStage, Plan]],
    config: AttentionConfig,
    target: Target,
) -> Iterator[tuple[str, str]]:
    yield "blocks", _blocks(run)
    yield "slots", _slots(run)
    most, each = memory_of(target.device_kind), " a device" if run.layout.mesh else ""
    held = f"{readable(run.cache_bytes)}{f' of {readable(most)}' if most else ''}{each}"
    frame = f"{readable(run.frame_bytes)} a frame"
    yield "cache", f"{held}: k and v of {run.model.layers} layers, {frame}"
    clean = ", and one over the clean block, which later blocks see" if run.clean_pass else ""
    yield "passes", f"{run.passes} a block: {run.steps} denoising steps{clean}"
    programs = ", ".join(f"{stage.name} ({_numbers(stage)})" for stage, _ in stages)
    yield "programs", f"{len(stages)}: {programs}"
    times = [None if made.call.mask.has_data else forward_time(made, config) for _, made in stages]
    for (stage, _), found in zip(stages, times, strict=True):
        yield stage.name.split()[0], _work(run, stage, found)
    if moves := tuple(run.moves()):
        yield from (("moves", f"{move}, a layer and pass over the cache") for move in moves)
    elif run.layout.mesh:
        yield "moves", "none over the cache: each device has whole batch rows and heads"
    if known := [found for found in times if found]:
        yield "times", f"{known[-1].how}"
    yield "rest", REST


def _blocks(run: StreamCosts) -> str:
    stream = run.layout.stream
    size, alone = stream.frames_per_block, ", frame 0 alone" * stream.first_frame_alone
    sees = "all before it" if stream.budget is None else f"at most {stream.budget} frames"
    own = f"{size} frame{'s' * (size > 1)} each, {size * stream.tokens_per_frame} tokens{alone}"
    video = f"; the video has {run.length} frames in {run.blocks} blocks" if run.length else ""
    return f"{own}; a block sees {sees}, its own included{video}"


def _slots(run: StreamCosts) -> str:
    layout, sink = run.layout, run.layout.sink
    ring = layout.frames - sink
    if layout.stream.window is None:
        return f"{layout.frames}, one for each frame of the video"
    if not sink:
        return f"{layout.frames}: frame f is in slot f % {ring}"
    place = f"frame f is in slot {sink} + (f - {sink}) % {ring}"
    return f"{layout.frames}: frames 0 to {sink - 1} stay, and {place}"


def _numbers(stage: StreamStage) -> str:
    first, last = stage.blocks
    if last is None:
        return f"from block {first} on"
    return f"block {first}" if first == last else f"blocks {first} to {last}"


def _work(run: StreamCosts, stage: StreamStage, found: Predicted | None) -> str:
    call, layers = stage.call, run.model.layers
    least, most = (layers * flops / prod(n for _, n in stage.mesh) for flops in stage.flops)
    lengths = f"T={call.q_len} S={stage.keys[0]}"
    if least < most:
        up_to = f"{lengths} to {stage.keys[1]} of {call.kv_len}"
        return f"{up_to}: {_tera(least)} to {_tera(most)} a pass"
    work = f"{lengths}: {_tera(most)} a pass, {_tera(run.passes * most)} a block"
    if found is None:
        return f"{work}; no time is known{' over a mesh' * bool(stage.mesh)}"
    rate = stage.flops[1] / found.seconds.slow / 1e12
    each, a_pass, a_block = (
        in_ms(Seconds(*(count * end for end in found.seconds)))
        for count in (1, layers, layers * run.passes)
    )
    return f"{work}; {each} a call, {rate:.0f} TFLOP/s, {a_pass} a pass, {a_block} a block"


def _tera(flops: float) -> str:
    return f"{flops / 1e12:.3g} TFLOP"
