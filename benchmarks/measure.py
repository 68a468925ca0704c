"""Measure a step of denoising or of training of Wan, SDXL or Flux.1 at real size, random weights.

A block of a video that Wan streams is measured as well.

    python benchmarks/measure.py wan denoise
    python benchmarks/measure.py wan train remat_policy=SAVE_ATTENTION --profile out/profile
    python benchmarks/measure.py sdxl train --batch 4 attention=dot_product
    python benchmarks/measure.py flux denoise --layers 5 10
    python benchmarks/measure.py wan train --size wan-2.2-ti2v-5b --height 704 --width 1280 \
        --frames 121 --lora 32 remat_policy=SAVE_ATTENTION
    python benchmarks/measure.py wan stream --window 12 --sink 3
    python benchmarks/measure.py wan stream --first
    python benchmarks/measure.py wan stream --target v6e

Prints milliseconds a step or a block, the peak of the device's memory, the share of the device's
peak rate (MFU), and with --profile how long attention, matrix products and the rest took.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))  # has the models

from maxattn_examples.common import flops
from maxattn_examples.common.scan import scan_here
from maxattn_examples.common.xla_options import sampling_options, xla_options
from maxattn_examples.flux.sizes import Sizes
from maxattn_examples.wan.sizes import SIZES
from measuring import breakdown, clock, workloads
from measuring.blocks import Blocks, passes
from measuring.steps import Step, denoising, training
from measuring.topology import Absent

import maxattn as ma
from maxattn.devices import peak_flops
from maxattn.errors import ConfigError, MaxattnError, escaped_output
from maxattn.tools.writable import check_writable, write_whole

DTYPES = {"bf16": jnp.bfloat16, "float32": jnp.float32}


def main(said: argparse.Namespace) -> None:
    """Compile, wait where that was asked for, run, and say what was seen."""
    config = ma.AttentionConfig.from_overrides(said.overrides)
    for option, folder in {"hlo": False, "json": False, "profile": True}.items():
        if path := getattr(said, option):
            check_writable(f"--{option}", path, folder)
    if said.target:
        return compile_for(said, config)
    work, blocks = workload(said, config), None
    if said.what == "stream":
        blocks = blocks_of(said, work)
        work = blocks.work
    began = time.perf_counter()
    step = step_of(said, work, blocks)
    compiled = time.perf_counter() - began
    say_compiled(said, work, step.compiled, f"{compiled:.0f} s")
    if not said.compile_only:
        run(said, work, blocks, step, compiled)


def compile_for(said: argparse.Namespace, config: ma.AttentionConfig) -> None:
    """Compile a block of a streamed video for a TPU that is not here."""
    if said.what != "stream" or said.option:
        rule = "a block of stream is compiled for a TPU that is not here, without --option"
        raise ConfigError("--target", said.target, rule, "write wan stream --target v6e")
    there = Absent.named(said.target)
    with there.target.assumed():
        blocks = blocks_of(said, workload(said, config))
        began = time.perf_counter()
        compiled = there.compiled(blocks.lowered(DTYPES[said.dtype], there.put))
    took = f"{time.perf_counter() - began:.0f} s for a {there.target.device_kind}"
    say_compiled(said, blocks.work, compiled, took)


def say_compiled(
    said: argparse.Namespace, work: workloads.Workload, compiled: Any, took: str
) -> None:
    """Say what memory a program needs, and write it where that was asked for."""
    needs = f"compiled in {took}, needs {compiler_bytes(compiled) / 2**30:.1f} GiB"
    print(f"{work.name}: {said.what}, {said.dtype}; {needs}", flush=True)
    if said.hlo:
        write_whole(Path(said.hlo), compiled.as_text())


def step_of(said: argparse.Namespace, work: workloads.Workload, blocks: Blocks | None) -> Step:
    """Compile the step."""
    read = xla_options if said.what == "train" else sampling_options
    options, dtype = read(said.option), DTYPES[said.dtype]
    if blocks is not None:
        return blocks.compiled(dtype, options)
    if said.what == "train":
        return training(work, dtype, options, said.lora)
    return denoising(work, dtype, options)


def blocks_of(said: argparse.Namespace, work: workloads.Workload) -> Blocks:
    """Return which blocks of a streamed video the command line asks for."""
    if said.model != "wan":
        rule = "Wan's transformer alone makes a video block by block"
        raise ConfigError("stream", said.model, rule, "write wan stream")
    if (sizes := SIZES[said.size]).in_channels != sizes.out_channels:
        rule = "a model with an image's channels beside the noise streams nothing here"
        raise ConfigError("--size", said.size, rule, "write a text-to-video model's")
    seen = (said.window, said.sink, said.frames_per_block)
    return Blocks.of(work, *seen, passes(said.denoising_steps, said.clean_pass), said.first)


def run(
    said: argparse.Namespace,
    work: workloads.Workload,
    blocks: Blocks | None,
    step: Step,
    compile_s: float,
) -> None:
    """Time a compiled step, print what was seen, and write it where that was asked for."""
    count = flops.count(step.forward, *step.shapes)
    wait_for(said.start_when)
    times = clock.measure(step, said.rounds, said.steps, said.profile)
    facts = facts_of(said, work, step, times, count) | {"compile_s": round(compile_s, 1)}
    facts |= {} if blocks is None else blocks.facts(step, times.median)
    print("\n".join(lines(facts)), flush=True)
    if said.json:
        write_whole(Path(said.json), json.dumps(facts, indent=2) + "\n")


def workload(said: argparse.Namespace, config: ma.AttentionConfig) -> workloads.Workload:
    """Return what the command line asks for."""
    scan = said.scan_layers is not False if said.what == "train" else scan_here(said.scan_layers)
    how: dict[str, Any] = {"scan_layers": scan}
    if said.model == "wan":
        size = (said.height or 480, said.width or 832, said.frames)
        return workloads.wan(config, said.batch or 1, *size, SIZES[said.size], **how)
    if said.model == "flux":
        sizes = flux_sizes(said.layers)
        size = (said.height or 1024, said.width or 1024)
        return workloads.flux(config, said.batch or 1, *size, sizes, **how)
    size = (said.height or 1024, said.width or 1024)
    return workloads.sdxl(config, said.batch or 8, *size, **how)


def flux_sizes(layers: list[int] | None) -> Sizes:
    """Return FLUX.1-dev's sizes, or those of one with so many double and single blocks."""
    if layers is None:
        return Sizes()
    return Sizes(num_layers=layers[0], num_single_layers=layers[1])


def wait_for(path: str | None) -> None:
    """Wait until a file is there, so that several commands can compile at once and run in turn."""
    if path is None:
        return
    Path(f"{path}.ready").touch()
    while not Path(path).exists():
        time.sleep(0.05)


def facts_of(
    said: argparse.Namespace,
    work: workloads.Workload,
    step: Step,
    times: clock.Times,
    count: flops.Work,
) -> dict[str, Any]:
    """Collect what was measured, for people and for files."""
    device = jax.local_devices()[0].device_kind
    total, peak = count.total(said.what == "train", frozen=said.lora > 0), peak_flops(device)
    kinds = breakdown.by_kind(times.kernels)
    return {
        "model": work.name,
        "step": said.what,
        "dtype": said.dtype,
        "lora_rank": said.lora,
        "overrides": said.overrides,
        "options": said.option,
        "scan_layers": said.scan_layers,
        "device": device,
        "jax": jax.__version__,
        "ms": times.median,
        "rounds_ms": times.ms,
        "peak_bytes": times.peak,
        "compiler_bytes": compiler_bytes(step.compiled),
        "tokens_per_s": 1e3 * work.tokens / times.median,
        "flop": total,
        "flop_attention_forward": count.attention,
        "flop_matmul_forward": count.matmul,
        "mfu": total / (times.median / 1e3) / peak if peak else None,
        "breakdown_ms": kinds,
        "idle_ms": times.idle,
        "attention_tflops": attention_rate(said.what, count.attention, kinds["attention"]),
        "kernels": [asdict(k) for k in times.kernels[:60]],
    }


def attention_rate(what: str, flop: int, ms: float) -> float | None:
    """Return attention's TFLOP/s; None without a profile, and where a backward runs as well."""
    return None if what == "train" or not ms else flop / ms / 1e9


def compiler_bytes(compiled: Any) -> int:
    """Return the bytes of arguments and temporaries, as the compiler counts them."""
    memory = compiled.memory_analysis()
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes if memory else 0


def lines(facts: dict[str, Any]) -> list[str]:
    """Write the facts for people."""
    spread = f"{min(facts['rounds_ms']):.1f} to {max(facts['rounds_ms']):.1f}"
    rate = facts["flop"] / facts["ms"] / 1e9
    mfu = f", {facts['mfu']:.0%} of the peak of an {facts['device']}" if facts["mfu"] else ""
    memory = facts["peak_bytes"] or facts["compiler_bytes"]
    account = "" if facts["peak_bytes"] else ", by the compiler's account"
    return [
        f"step    {facts['ms']:.1f} ms ({spread}), {facts['tokens_per_s']:,.0f} tokens/s",
        f"work    {facts['flop'] / 1e12:.1f} TFLOP without recomputation, {rate:.0f} TFLOP/s{mfu}",
        f"memory  {memory / 2**30:.1f} GiB{account}",
        *block_lines(facts),
        *kernel_lines(facts),
    ]


def block_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Write what only a block of a streamed video has."""
    if facts["step"] == "stream":
        video = (
            f"{facts['video_frames']} frames of video, {facts['video_frames_per_s']:.1f} a second"
        )
        yield f"block   {video}; cache of {facts['cache_bytes'] / 2**30:.2f} GiB"


def kernel_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Write where the time went, where a profile says it."""
    times = facts["breakdown_ms"]
    if not any(times.values()):
        return
    idle = f"; the device had nothing to do for {facts['idle_ms']:.1f} ms"
    yield f"time    {', '.join(f'{kind} {ms:.1f} ms' for kind, ms in times.items())}{idle}"
    if facts["attention_tflops"]:
        yield f"        attention at {facts['attention_tflops']:.0f} TFLOP/s"
    for kernel in facts["kernels"][:20]:
        took = f"{kernel['ms']:8.2f} ms  {kernel['calls']:6.1f} x"
        yield f"        {took}  {kernel['kind']:9}  {kernel['name'][:90]}"


def parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = found.add_argument
    add("model", choices=("wan", "sdxl", "flux"))
    add("what", choices=("denoise", "train", "stream"))
    told = "attention's settings: attention=dot_product"
    add("overrides", nargs="*", default=[], metavar="key=value", help=told)
    default = "default 1 video of 832x480, 8 pictures of 1024x1024 by SDXL, 1 by Flux.1"
    for name, told in {
        "batch": "examples in a step",
        "height": "pixels",
        "width": "pixels",
    }.items():
        add(f"--{name}", type=int, help=f"{told}; {default}")
    add("--frames", type=int, default=81, help="of a video; default 81")
    told = "of Flux.1: double and single blocks; default 19 38"
    add("--layers", type=int, nargs=2, metavar="N", help=told)
    add("--size", choices=SIZES, default="wan-2.1-t2v-1.3b", help="of Wan; default the 1.3B")
    told = "train LoRA's matrices of this rank alone; default 0, all parameters"
    add("--lora", type=int, default=0, metavar="RANK", help=told)
    told = "compile each block, or one for all; default as model.scan_layers: null has it"
    add("--scan-layers", action=argparse.BooleanOptionalAction, help=told)
    add("--dtype", choices=DTYPES, default="bf16", help="of the computation; default bf16")
    told = "of XLA's compiler; on a GPU denoising and streaming have those of sampling before"
    add("--option", action="append", default=[], metavar="NAME=VALUE", help=told)
    _add_blocks(found)
    _add_timing(found)
    return found


def _add_blocks(found: argparse.ArgumentParser) -> None:
    add = found.add_argument_group("of stream", "lengths are latent frames").add_argument
    told = "that a block sees, its own included, or all: those of --frames; default 21"
    add("--window", type=frames_or_all, default=21, metavar="N", help=told)
    told = "first frames that stay visible, of these; default 0"
    add("--sink", type=int, default=0, metavar="N", help=told)
    add("--frames-per-block", type=int, default=3, metavar="N", help="default 3")
    told = "passes from noise, before the clean one; default 4"
    add("--denoising-steps", type=int, default=4, metavar="N", help=told)
    told = "a last pass, which keeps the clean block; default yes"
    add("--clean-pass", action=argparse.BooleanOptionalAction, default=True, help=told)
    told = "the first block, instead of one that finds the cache full"
    add("--first", action="store_true", help=told)


def frames_or_all(text: str) -> int | None:
    """Read a number of frames, or None for all."""
    return None if text == "all" else int(text)


def _add_timing(found: argparse.ArgumentParser) -> None:
    add = found.add_argument
    add("--rounds", type=int, default=5, help="that are timed; default 5")
    add("--steps", type=int, default=3, help="or blocks in a round; default 3")
    add("--profile", metavar="FOLDER", help="record a round, and say where its time went")
    add("--hlo", metavar="FILE", help="write the compiled program")
    add("--json", metavar="FILE", help="write every figure")
    told = "run nothing: fills JAX_COMPILATION_CACHE_DIR"
    add("--compile-only", action="store_true", help=told)
    told = "of stream: compile for a TPU that is not here (v5e, v5p, v6e), and say its memory"
    add("--target", metavar="TPU", help=told)
    told = "compile, touch FILE.ready, and run once FILE is there"
    add("--start-when", metavar="FILE", help=told)


if __name__ == "__main__":
    try:
        with escaped_output():
            main(parser().parse_args())
    except MaxattnError as error:
        sys.exit(f"error: {error}")
