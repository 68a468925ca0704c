"""What both commands share: options, the wait for a file, and how they say what was seen."""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "diffusers", "triton")
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """Make a parser with the options of both commands.

    Args:
        doc: of the command.
    """
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
    """Wait until a file is there, so that several commands warm up at once and run in turn."""
    if path is None:
        return
    Path(f"{path}.ready").touch()
    while not Path(path).exists():
        time.sleep(0.05)


def report(facts: dict[str, Any], file: str | None) -> None:
    """Print what was seen, and write it where that was asked for.

    Args:
        facts: with `ms`, `rounds_ms` and `peak_bytes`.
        file: for all of them.
    """
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
