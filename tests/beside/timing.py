"""Options of both commands, timing as the clock of measuring does, and the report."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any

PACKAGES = ("torch", "diffusers", "triton")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
KINDS = {
    "attention": re.compile(r"flash|fmha|sdpa|attention"),
    "matmul": re.compile(r"gemm|cublas|nvjet|xmma|cutlass|mm_|addmm|conv_|convolution"),
}
ALL = (*KINDS, "rest")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of both commands."""
    raw = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(description=doc, formatter_class=raw)
    add = found.add_argument
    add("--rounds", type=int, default=5, help="that are timed; default 5")
    add("--steps", type=int, default=3, help="or blocks in a round; default 3")
    add("--mode", choices=MODES, default="default", help="of torch.compile")
    add("--profile", action="store_true", help="one more round: where its time goes")
    add("--json", metavar="FILE", help="write every figure")
    add("--start-when", metavar="FILE", help="warm up, touch FILE.ready, run once FILE is there")
    add("--tiny", action="store_true", help="a model of a few channels, to try the command")
    add("--device", default="cuda", help="default cuda")
    return found


def wait_for(path: str | None) -> None:
    """Wait until a file exists, so that several commands warm up at once and run in turn."""
    if path is None:
        return
    Path(f"{path}.ready").touch()
    while not Path(path).exists():
        sleep(0.05)


def report(facts: dict[str, Any], file: str | None) -> None:
    """Print the figures, and write them to a file if one is named."""
    facts = facts | {name: _version(name) for name in PACKAGES}
    print("\n".join(_lines(facts)), flush=True)
    if file:
        Path(file).write_text(json.dumps(facts, indent=1) + "\n")


def _lines(facts: dict[str, Any]) -> list[str]:
    spread = f"{min(facts['rounds_ms']):.1f} to {max(facts['rounds_ms']):.1f}"
    memory = f"{facts['peak_bytes'] / 2**30:.1f} GiB"
    found = [
        f"{facts['model']}: {facts['step']}, {facts['how']}; warm in {facts['warm_s']:.0f} s",
        f"step    {facts['ms']:.1f} ms ({spread}), peak memory {memory}, {facts['device']}",
    ]
    if facts.get("video_frames"):
        rate = f"{facts['video_frames_per_s']:.1f} a second"
        cache = f"cache of {facts['cache_bytes'] / 2**30:.2f} GiB"
        found.append(f"block   {facts['video_frames']} frames of video, {rate}; {cache}")
    if any(facts["breakdown_ms"].values()):
        times = (f"{kind} {ms:.1f} ms" for kind, ms in facts["breakdown_ms"].items())
        found.append(f"time    {', '.join(times)}")
    if facts.get("attention_tflops"):
        found.append(f"        attention at {facts['attention_tflops']:.0f} TFLOP/s")
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---- timing --------------------------------------------------------------------------------------


def measure(run: Callable[[], Any], args: Any) -> dict[str, Any]:
    """Warm up a step, wait if the command line asks for it, and time rounds."""
    began = perf_counter()
    for _ in range(2):
        run()
    synchronize(args.device)
    warm = perf_counter() - began
    wait_for(args.start_when)
    times = [_round(run, args) for _ in range(args.rounds + 1)][1:]
    return {
        "ms": median(times),
        "rounds_ms": times,
        "warm_s": round(warm, 1),
        "peak_bytes": peak_bytes(args.device),
        "device": device_name(args.device),
        "breakdown_ms": breakdown(run, args) if args.profile else dict.fromkeys(ALL, 0.0),
    }


def _round(run: Callable[[], Any], args: Any) -> float:
    began = perf_counter()
    for _ in range(args.steps):
        run()
    synchronize(args.device)
    return 1e3 * (perf_counter() - began) / args.steps


def breakdown(run: Callable[[], Any], args: Any) -> dict[str, float]:
    """Profile a round: milliseconds of a step in attention, matrix products and the rest."""
    import torch

    gpu, cuda = args.device != "cpu", torch.autograd.DeviceType.CUDA
    with torch.profiler.profile() as seen:
        _round(run, args)
    found = dict.fromkeys(ALL, 0.0)
    for event in seen.key_averages():
        if gpu and (event.device_type != cuda or event.is_user_annotation):
            continue
        spent = event.self_device_time_total if gpu else event.self_cpu_time_total
        kind = next(
            (kind for kind, words in KINDS.items() if words.search(event.key.lower())), "rest"
        )
        found[kind] += spent / 1e3 / args.steps
    return found


def synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()


def forget_peak(device: str) -> None:
    """Start to count the peak of memory, without the memory that building a model took."""
    import torch

    if device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_bytes(device: str) -> int:
    """Return the most bytes that tensors took; 0 on a CPU, where torch does not count."""
    import torch

    return 0 if device == "cpu" else torch.cuda.max_memory_allocated()


def device_name(device: str) -> str:
    import torch

    return "cpu" if device == "cpu" else torch.cuda.get_device_name()
