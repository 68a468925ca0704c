"""Three reports on this machine's kernels, as tables and pictures.

implementations  naive, tiled and flash attention by length: time, memory, speedup
block-window     forward and backward of a block window by length, beside a dense mask
layers           one training step of a self-attention layer by kernel: time and memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

from maxattn.errors import InputError
from maxattn.kernels import KERNELS, refusal
from maxattn.masks import BlockSlidingWindow
from maxattn.measuring.columns import columns
from maxattn.target import Target
from maxattn.tools.bench.kernels import bench, too_large
from maxattn.tools.bench.module import bench_module
from maxattn.tools.bench.row import BACKWARD, BOTH, FORWARD, BenchRow
from maxattn.tools.model_shapes import SHAPES, Shape, read
from maxattn.weights.replacing import replacing

NAIVE, TILED = "dot_product", "memory_efficient"
MIB, GIB = 2**20, 2**30
INCHES, DPI = (4.2, 3.2), 110  # of a panel
Curves = dict[str, list[tuple[int, float]]]
"""Points (tokens, value) by label."""


@dataclass(frozen=True)
class Report:
    """One report's result: tables as text, measurements, and a picture made of panels (title, unit
    of the y axis, curves) or of bars (label, ms, GiB).
    """

    name: str
    text: str
    rows: list[BenchRow]
    panels: tuple[tuple[str, str, Curves], ...] = ()
    bars: tuple[tuple[str, float, float], ...] = ()


def make(name: str, target: Target, budget: float = 0.3) -> Report:
    """Measure and format one of `REPORTS`; on a CPU the sizes are small."""
    return REPORTS[name](target, budget)


def _implementations(target: Target, budget: float) -> Report:
    lengths = (64, 128) if target.platform == "cpu" else (1024, 2048, 4096, 8192, 16384)
    names = {"naive": NAIVE, "tiled": TILED}
    # A CPU only interprets the other kernels, and such times mean nothing.
    fused = ("flash", "tokamax_flash", "cudnn", "cudnn_flash_te") if len(lengths) > 2 else ()
    if runs := _that_run(fused, read("1,256,256,16,64"), target):
        names["flash"] = runs[0]
    rows, tables, times, memory = [], [], Curves(), Curves()
    for length in lengths:
        shape = read(f"1,{length},{length},16,64")
        found = bench(shape, tuple(names.values()), False, target, budget)
        by_kernel = {row.who: row for row in found if row.what == FORWARD}
        lines = [("implementation", "kernel", "time (ms)", "memory (MiB)", "speedup")]
        naive = by_kernel[NAIVE].ms
        for label, kernel in names.items():
            row = by_kernel[kernel]
            speedup = f"{naive / row.ms:.1f}x" if naive and row.ms else "-"
            time = f"{row.ms:.3f}" if row.ms else "-"
            lines.append((label, kernel, time, f"{row.peak / MIB:.0f}", speedup))
            if row.ms:
                times.setdefault(label, []).append((length, row.ms))
                memory.setdefault(label, []).append((length, row.peak / MIB))
        rows += found
        tables.append(_table(f"{length} tokens, 16 heads of 64, forward", lines))
    panels = ("time, forward", "ms", times), ("memory", "MiB", memory)
    return Report("implementations", "\n\n".join(tables), rows, panels)


def _block_window(target: Target, budget: float) -> Report:
    small = target.platform == "cpu"
    block, window = (16, 4) if small else (256, 16)
    lines = [("tokens", "kernel", "pass", "time (ms)", "TFLOP/s", "memory (MiB)")]
    rows, curves = [], {FORWARD: Curves(), BACKWARD: Curves()}
    for length in (64, 128) if small else (4096, 8192, 16384, 32768, 65536):
        mask = BlockSlidingWindow(block, window)
        shape = replace(read(f"1,{length},{length},12,64"), mask=mask)
        fused = _that_run(() if small else ("flash", "tokamax_flash"), shape, target) or [TILED]
        dense = [] if too_large(NAIVE, shape) else [NAIVE]
        found = bench(shape, (*fused, *dense), False, target, budget)
        rows += found
        for row in (row for row in found if row.ms):
            numbers = f"{row.ms:.3f}", f"{row.tflops:.1f}", f"{row.peak / MIB:.0f}"
            lines.append((str(length), row.who, row.what, *numbers))
            curves[row.what].setdefault(row.who, []).append((length, row.ms))
    head = f"block window: each token sees {window} blocks of {block} tokens; 12 heads of 64"
    panels = tuple((f"{what} time", "ms", its) for what, its in curves.items())
    return Report("block-window", _table(head, lines), rows, panels)


def _layers(target: Target, budget: float) -> Report:
    real = [SHAPES["sdxl-64"], SHAPES["wan-1.3b-480p"]]
    shapes = [read("1,256,256,4,64")] if target.platform == "cpu" else real
    rows = [r for s in shapes for name in KERNELS for r in _layer(s, name, target, budget)]
    lines = [("layer", "attention", "step (ms)", "memory (GiB)")]
    for row in rows:
        memory = f"{row.peak / GIB:.2f}" if row.ms else "-"
        lines.append((row.shape, row.who, f"{row.ms:.2f}" if row.ms else row.note[:60], memory))
    bars = tuple((f"{row.shape} {row.who}", row.ms, row.peak / GIB) for row in rows if row.ms)
    parts = "projections, norms, RoPE, attention, output"
    head = f"one training step of a self-attention layer: {parts}"
    return Report("layers", _table(head, lines), rows, bars=bars)


def _layer(shape: Shape, kernel: str, target: Target, budget: float) -> list[BenchRow]:
    if too_large(kernel, shape):
        return [BenchRow(shape.name, kernel, BOTH, note="left out: too much memory or time")]
    if refusal(kernel, shape.call(), target) is not None:
        return []
    rows = bench_module(shape, kernel, budget=budget, alone=True)
    return [replace(row, who=kernel) for row in rows if row.what == BOTH or row.note]


REPORTS: dict[str, Callable[[Target, float], Report]] = {
    "implementations": _implementations,
    "block-window": _block_window,
    "layers": _layers,
}


def _that_run(names: Sequence[str], shape: Shape, target: Target) -> list[str]:
    return [name for name in names if refusal(name, shape.call(), target) is None]


def _table(head: str, lines: Sequence[Sequence[object]]) -> str:
    return "\n".join((head, *columns(lines)))


def draw(report: Report, device: str, path: Path) -> None:
    """Draw a report as a PNG with matplotlib, which must be installed."""
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        rule, remedy = "pictures need matplotlib", 'pip install "maxattn[plot]"'
        raise InputError("--pictures", path.parent, rule, remedy) from None
    matplotlib.use("Agg")
    plt = import_module("matplotlib.pyplot")
    panels = 2 if report.bars else len(report.panels)
    figure, axes = plt.subplots(1, panels, figsize=(INCHES[0] * panels, INCHES[1]), squeeze=False)
    for which, unit in enumerate(("ms a step", "GiB") if report.bars else ()):
        ax = axes[0][which]
        ax.barh([bar[0] for bar in report.bars], [bar[1 + which] for bar in report.bars])
        ax.invert_yaxis()
        ax.set(xlabel=unit)
        ax.tick_params(axis="y", labelsize=6)
    for ax, (title, unit, curves) in zip(axes[0], report.panels, strict=False):
        for label, points in curves.items():
            tokens, values = zip(*points, strict=True)
            ax.plot(tokens, values, marker="o", markersize=3, label=label)
        ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit, title=title)
        ax.set_xscale("log", base=2)
        ax.grid(True, which="both", alpha=0.3)
        ax.legend(fontsize=7)
    figure.suptitle(f"{report.name}, {device}", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=DPI)
    plt.close(figure)
