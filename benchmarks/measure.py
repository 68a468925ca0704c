"""Measure a step of Wan, SDXL or Flux.1 at real size, or a block of Wan's streamed video.

Weights are random:

    python benchmarks/measure.py wan denoise
    python benchmarks/measure.py wan train remat_policy=SAVE_ATTENTION --profile out/profile
    python benchmarks/measure.py sdxl train --batch 4 attention=dot_product
    python benchmarks/measure.py flux denoise --layers 5 10
    python benchmarks/measure.py wan train --size wan-2.2-ti2v-5b --height 704 --width 1280 \
        --frames 121 --lora 32 remat_policy=SAVE_ATTENTION
    python benchmarks/measure.py wan stream --window 12 --sink 3
    python benchmarks/measure.py wan stream --first
    python benchmarks/measure.py wan stream --target v6e

Prints the milliseconds of a step or block, the peak of the device's memory, the share of the
device's peak rate (MFU), and with --profile the time of attention, matrix products and the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from model_steps import clock, workloads
from model_steps.absent_tpu import AbsentTpu
from model_steps.blocks import Blocks, passes
from model_steps.steps import Step, denoising, training
from model_steps.workloads import SIZES, FluxSizes

import maxattn as ma
from maxattn.devices import peak_flops
from maxattn.errors import ConfigError, MaxattnError, escaped_output
from maxattn.tools.writable import check_writable, write_whole

DTYPES = {"bf16": jnp.bfloat16, "float32": jnp.float32}


def main(args: argparse.Namespace) -> None:
    """Compile the step, wait if --start-when asks for it, time the step, and print the figures."""
    config = ma.AttentionConfig.from_overrides(args.overrides)
    for option in ("hlo", "json", "profile"):
        if path := getattr(args, option):
            check_writable(f"--{option}", path, folder=option == "profile")
    if args.target:
        return compile_for_target(args, config)
    began = time.perf_counter()
    step = step_of(args, workload(args, config))
    seconds = time.perf_counter() - began
    report_compiled(args, step.work, step.compiled, f"{seconds:.0f} s")
    if args.compile_only:
        return
    wait_for(args.start_when)
    times = clock.measure(step, args.rounds, args.steps, args.profile)
    facts = facts_of(args, step, times) | {"compile_s": round(seconds, 1)}
    facts |= step.facts(step, times.median)
    print("\n".join(lines(facts)), flush=True)
    if args.json:
        write_whole(Path(args.json), json.dumps(facts, indent=2) + "\n")


def compile_for_target(args: argparse.Namespace, config: ma.AttentionConfig) -> None:
    """Compile a block of a streamed video for a TPU that this machine does not have."""
    if args.what != "stream" or args.option:
        rule = "only blocks of stream are compiled for an absent TPU, and without --option"
        raise ConfigError("--target", args.target, rule, "write wan stream --target v6e")
    absent = AbsentTpu.named(args.target)
    with absent.target.assumed():
        blocks = blocks_of(args, workload(args, config))
        began = time.perf_counter()
        compiled = absent.compiled(blocks.lowered(DTYPES[args.dtype], absent.put))
    took = f"{time.perf_counter() - began:.0f} s for a {absent.target.device_kind}"
    report_compiled(args, blocks.work, compiled, took)


def report_compiled(
    args: argparse.Namespace, work: workloads.Workload, compiled: Any, took: str
) -> None:
    """Print the memory of a program, and write its text if --hlo asks for it."""
    needs = f"compiled in {took}, needs {compiler_bytes(compiled) / 2**30:.1f} GiB"
    print(f"{work.name}: {args.what}, {args.dtype}; {needs}", flush=True)
    if args.hlo:
        write_whole(Path(args.hlo), compiled.as_text())


def compiler_bytes(compiled: Any) -> int:
    """Return the bytes of arguments and temporaries, as the compiler reports them."""
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else 0


def wait_for(path: str | None) -> None:
    """Wait until a file exists, so that several commands compile at once and run in turn."""
    if path is None:
        return
    Path(f"{path}.ready").touch()
    while not Path(path).exists():
        time.sleep(0.05)


# ---- what is measured ----------------------------------------------------------------------------


def workload(args: argparse.Namespace, config: ma.AttentionConfig) -> workloads.Workload:
    """Return the model and its inputs."""
    how: dict[str, Any] = {"scan_layers": args.scan_layers}
    if args.what == "train":
        how["scan_layers"] = args.scan_layers is not False
    if args.model == "wan":
        size = args.height or 480, args.width or 832, args.frames
        return workloads.wan(config, args.batch or 1, *size, SIZES[args.size], **how)
    size = args.height or 1024, args.width or 1024
    if args.model == "sdxl":
        return workloads.sdxl(config, args.batch or 8, *size, **how)
    layers = zip(("num_layers", "num_single_layers"), args.layers or (), strict=False)
    return workloads.flux(config, args.batch or 1, *size, FluxSizes(**dict(layers)), **how)


def step_of(args: argparse.Namespace, work: workloads.Workload) -> Step:
    """Compile the step."""
    dtype = DTYPES[args.dtype]
    if args.what == "train":
        return training(work, dtype, args.option, args.lora)
    if args.what == "stream":
        return blocks_of(args, work).compiled(dtype, args.option)
    return denoising(work, dtype, args.option)


def blocks_of(args: argparse.Namespace, work: workloads.Workload) -> Blocks:
    """Return the blocks of a streamed video; refuse models that do not stream."""
    if args.model != "wan":
        rule = "only Wan makes a video block by block"
        raise ConfigError("stream", args.model, rule, "write wan stream")
    if (sizes := SIZES[args.size]).in_channels != sizes.out_channels:
        rule = "a model with an image's channels beside the noise does not stream here"
        raise ConfigError("--size", args.size, rule, "name a text-to-video model")
    seen = args.window, args.sink, args.frames_per_block
    return Blocks.of(work, *seen, passes(args.denoising_steps, args.clean_pass), args.first)


# ---- the report ----------------------------------------------------------------------------------


def facts_of(args: argparse.Namespace, step: Step, times: clock.Times) -> dict[str, Any]:
    """Collect the figures for `lines` and --json."""
    device, count = jax.local_devices()[0].device_kind, step.operations()
    total, peak = count.total(args.what == "train", frozen=args.lora > 0), peak_flops(device)
    kinds = times.by_kind()
    # With a backward, the profile does not separate the forward's attention.
    attention = 0.0 if args.what == "train" else kinds[clock.ATTENTION]
    return {
        "model": step.work.name,
        "step": args.what,
        "dtype": args.dtype,
        "lora_rank": args.lora,
        "overrides": args.overrides,
        "options": args.option,
        "scan_layers": args.scan_layers,
        "device": device,
        "jax": jax.__version__,
        "ms": times.median,
        "rounds_ms": times.ms,
        "peak_bytes": times.peak,
        "compiler_bytes": compiler_bytes(step.compiled),
        "tokens_per_s": 1e3 * step.work.tokens / times.median,
        "flop": total,
        "flop_attention_forward": count.attention,
        "flop_matmul_forward": count.matmul,
        "mfu": total / (times.median / 1e3) / peak if peak else None,
        "breakdown_ms": kinds,
        "idle_ms": times.idle,
        "attention_tflops": count.attention / attention / 1e9 if attention else None,
        "kernels": [k._asdict() for k in times.kernels[:60]],
    }


def lines(facts: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report."""
    spread = f"{min(facts['rounds_ms']):.1f} to {max(facts['rounds_ms']):.1f}"
    rate = facts["flop"] / facts["ms"] / 1e9
    mfu = f", {facts['mfu']:.0%} of the peak of an {facts['device']}" if facts["mfu"] else ""
    memory = facts["peak_bytes"] or facts["compiler_bytes"]
    source = "" if facts["peak_bytes"] else ", as the compiler reports"
    yield f"step    {facts['ms']:.1f} ms ({spread}), {facts['tokens_per_s']:,.0f} tokens/s"
    yield f"work    {facts['flop'] / 1e12:.1f} TFLOP without recomputation, {rate:.0f} TFLOP/s{mfu}"
    yield f"memory  {memory / 2**30:.1f} GiB{source}"
    if facts["step"] == "stream":
        video = f"{facts['video_frames']} frames of video, {facts['video_frames_per_s']:.1f} fps"
        yield f"block   {video}; cache of {facts['cache_bytes'] / 2**30:.2f} GiB"
    if any((times := facts["breakdown_ms"]).values()):
        kinds = ", ".join(f"{kind} {ms:.1f} ms" for kind, ms in times.items())
        yield f"time    {kinds}; the device was idle for {facts['idle_ms']:.1f} ms"
        if facts["attention_tflops"]:
            yield f"        attention at {facts['attention_tflops']:.0f} TFLOP/s"
        for kernel in facts["kernels"][:20]:
            took = f"{kernel['ms']:8.2f} ms  {kernel['calls']:6.1f} x"
            yield f"        {took}  {kernel['kind']:9}  {kernel['name'][:90]}"


# ---- the command line ----------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = made.add_argument
    add("model", choices=("wan", "sdxl", "flux"))
    add("what", choices=("denoise", "train", "stream"))
    settings = "settings of attention, such as attention=dot_product"
    add("overrides", nargs="*", default=[], metavar="key=value", help=settings)
    add("--batch", type=int, help="examples in a step; default 8 for SDXL, else 1")
    add("--height", type=int, help="pixels; default 480 for Wan, else 1024")
    add("--width", type=int, help="pixels; default 832 for Wan, else 1024")
    add("--frames", type=int, default=81, help="frames of a video; default 81")
    layers = "double and single blocks of Flux.1; default 19 38"
    add("--layers", type=int, nargs=2, metavar="N", help=layers)
    add("--size", choices=SIZES, default="wan-2.1-t2v-1.3b", help="model of Wan; default the 1.3B")
    rank = "train only LoRA matrices of this rank; default 0, all parameters"
    add("--lora", type=int, default=0, metavar="RANK", help=rank)
    scan = "one program for all layers; default as for model.scan_layers: null"
    add("--scan-layers", action=argparse.BooleanOptionalAction, help=scan)
    add("--dtype", choices=DTYPES, default="bf16", help="dtype of the computation; default bf16")
    option = "option of XLA's compiler, after those that sampling uses on a GPU"
    add("--option", action="append", default=[], metavar="NAME=VALUE", help=option)
    _add_blocks(made)
    _add_timing(made)
    return made


def _add_blocks(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("options of stream", "lengths are latent frames").add_argument
    window = "frames that a block sees, its own included, or all: the whole video; default 21"
    add("--window", type=frames_or_all, default=21, metavar="N", help=window)
    sink = "first frames that stay visible, inside the window; default 0"
    add("--sink", type=int, default=0, metavar="N", help=sink)
    add("--frames-per-block", type=int, default=3, metavar="N", help="default 3")
    steps = "noisy passes of a block; default 4"
    add("--denoising-steps", type=int, default=4, metavar="N", help=steps)
    clean = "a last pass, which caches the clean block; default yes"
    add("--clean-pass", action=argparse.BooleanOptionalAction, default=True, help=clean)
    first = "measure the first block, instead of one that finds a full cache"
    add("--first", action="store_true", help=first)
    target = "compile for a TPU (v5e, v5p, v6e) that is not here, and print the memory"
    add("--target", metavar="TPU", help=target)


def frames_or_all(text: str) -> int | None:
    """Read a number of frames, or None for "all"."""
    return None if text == "all" else int(text)


def _add_timing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="timed rounds; default 5")
    add("--steps", type=int, default=3, help="steps or blocks in a round; default 3")
    add("--profile", metavar="FOLDER", help="profile one more round, and print its kernels")
    add("--hlo", metavar="FILE", help="write the compiled program")
    add("--json", metavar="FILE", help="write all figures")
    only = "compile, and fill JAX_COMPILATION_CACHE_DIR, without a run"
    add("--compile-only", action="store_true", help=only)
    start = "compile, touch FILE.ready, and run once FILE exists"
    add("--start-when", metavar="FILE", help=start)


if __name__ == "__main__":
    try:
        with escaped_output():
            main(parser().parse_args())
    except MaxattnError as error:
        sys.exit(f"error: {error}")
