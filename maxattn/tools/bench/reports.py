"""Three reports on this machine's kernels, as tables and pictures.

implementations  naive, tiled and flash attention by length: time, memory, speedup
block-window     forward and backward by length: a window of blocks, beside a dense mask
layers           one training step of a self-attention layer by kernel: time and memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maxattn.kernels import KERNELS, refusal
from maxattn.masks import BlockSlidingWindow
from maxattn.target import Target
from maxattn.tools.bench.jobs import too_large
from maxattn.tools.bench.measure import bench
from maxattn.tools.bench.module import bench_module
from maxattn.tools.bench.row import BACKWARD, BOTH, FORWARD, BenchRow
from maxattn.tools.model_shapes import SHAPES, Shape, read

NAIVE, TILED = "dot_product", "memory_efficient"


@dataclass(frozen=True)
class Curve:
    """Hold one line of a picture.

    Args:
        label: what it shows.
        tokens: on the x axis.
        values: on the y axis.
    """

    label: str
    tokens: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Report:
    """Hold what one report measured and says.

    Args:
        name: of the report.
        text: its tables, for a terminal.
        rows: the measurements.
        panels: (title, unit of the y axis, curves) of each picture.
        bars: (label, ms, GiB) of each bar, where it is bars.
    """

    name: str
    text: str
    rows: tuple[BenchRow, ...]
    panels: tuple[tuple[str, str, tuple[Curve, ...]], ...] = ()
    bars: tuple[tuple[str, float, float], ...] = ()


def make(name: str, target: Target, budget: float = 0.3) -> Report:
    """Measure and write one of `REPORTS`.

    Args:
        name: of the report.
        target: this machine; on a CPU the sizes are small.
        budget: seconds for one measurement, about.
    """
    return REPORTS[name](target, budget)


# ---- naive, tiled, flash -------------------------------------------------------------------------


def _implementations(target: Target, budget: float) -> Report:
    lengths = (64, 128) if target.platform == "cpu" else (1024, 2048, 4096, 8192, 16384)
    fused = _fused(read("1,256,256,16,64"), target)
    names = {"naive": NAIVE, "tiled": TILED} | ({"flash": fused} if fused else {})
    kernels, shapes = tuple(names.values()), [f"1,{n},{n},16,64" for n in lengths]
    rows = [r for s in shapes for r in bench(read(s), kernels, False, target, budget)]
    at = {(row.shape, row.who): row for row in rows if row.what == FORWARD}
    found = {label: [at[shape, who] for shape in shapes] for label, who in names.items()}
    title = "{} tokens, 16 heads of 64, forward"
    tables = [_compared(title.format(length), found, i) for i, length in enumerate(lengths)]
    panels = tuple(
        (title, unit, tuple(_curve(label, lengths, each, of) for label, each in found.items()))
        for title, unit, of in (("time, forward", "ms", _ms), ("memory", "MiB", _mib))
    )
    return Report("implementations", "\n\n".join(tables), tuple(rows), panels)


def _compared(title: str, found: dict[str, list[BenchRow]], i: int) -> str:
    naive = found["naive"][i].ms
    lines = [("implementation", "kernel", "time (ms)", "memory (MiB)", "speedup")]
    for label, rows in found.items():
        row = rows[i]
        time = f"{row.ms:.3f}" if row.ms else "-"
        speedup = f"{naive / row.ms:.1f}x" if naive and row.ms else "-"
        lines.append((label, row.who, time, f"{_mib(row):.0f}", speedup))
    return f"{title}\n{_columns(lines)}"


# ---- block window --------------------------------------------------------------------------------


def _block_window(target: Target, budget: float) -> Report:
    small = target.platform == "cpu"
    block, window = (16, 4) if small else (256, 16)
    lengths = (64, 128) if small else (4096, 8192, 16384, 32768, 65536)
    mask = BlockSlidingWindow(block, window)
    shapes = [replace(read(f"1,{n},{n},12,64"), mask=mask) for n in lengths]
    rows = [r for s in shapes for r in bench(s, _windowed(s, target), False, target, budget)]
    panels = tuple((f"{what} time", "ms", _by_tokens(rows, what)) for what in (FORWARD, BACKWARD))
    head = f"block window: each token sees {window} blocks of {block} tokens; 12 heads of 64"
    return Report("block-window", f"{head}\n{_columns(_lines(rows))}", tuple(rows), panels)


def _windowed(shape: Shape, target: Target) -> tuple[str, ...]:
    """Return the flash kernels that can run, else the blockwise one, and dense where it fits."""
    flash = () if target.platform == "cpu" else ("flash", "tokamax_flash")
    fused = [name for name in flash if refusal(name, shape.call(), target) is None]
    return (*(fused or [TILED]), *([] if too_large(NAIVE, shape) else [NAIVE]))


def _lines(rows: list[BenchRow]) -> list[tuple[str, ...]]:
    head = ("tokens", "kernel", "pass", "time (ms)", "TFLOP/s", "memory (MiB)")
    return [head, *(_cells(row) for row in rows if row.ms)]


def _cells(row: BenchRow) -> tuple[str, ...]:
    numbers = f"{row.ms:.3f}", f"{row.tflops:.1f}", f"{_mib(row):.0f}"
    return str(_tokens(row)), row.who, row.what, *numbers


def _tokens(row: BenchRow) -> int:
    return int(row.shape.split(",")[1])


def _by_tokens(rows: list[BenchRow], what: str) -> tuple[Curve, ...]:
    """Return a curve for each kernel."""
    found: dict[str, list[BenchRow]] = {}
    for row in rows:
        if row.ms and row.what == what:
            found.setdefault(row.who, []).append(row)
    return tuple(
        Curve(who, tuple(map(_tokens, each)), tuple(row.ms for row in each))
        for who, each in found.items()
    )


# ---- layers --------------------------------------------------------------------------------------


def _layers(target: Target, budget: float) -> Report:
    real = [SHAPES["sdxl-64"], SHAPES["wan-1.3b-480p"]]
    shapes = [read("1,256,256,4,64")] if target.platform == "cpu" else real
    rows = [r for s in shapes for name in KERNELS for r in _layer(s, name, target, budget)]
    lines = [("layer", "attention", "step (ms)", "memory (GiB)")]
    for row in rows:
        memory = f"{row.peak / 2**30:.2f}" if row.ms else "-"
        lines.append((row.shape, row.who, f"{row.ms:.2f}" if row.ms else row.note[:60], memory))
    bars = tuple((f"{row.shape} {row.who}", row.ms, row.peak / 2**30) for row in rows if row.ms)
    head = (
        "one training step of a self-attention layer: projections, norms, RoPE, attention, output"
    )
    return Report("layers", f"{head}\n{_columns(lines)}", tuple(rows), bars=bars)


def _layer(shape: Shape, kernel: str, target: Target, budget: float) -> list[BenchRow]:
    """Measure a layer with one kernel; nothing where it cannot run."""
    if too_large(kernel, shape):
        return [BenchRow(shape.name, kernel, BOTH, note="left out: too much memory or time")]
    if refusal(kernel, shape.call(), target) is not None:
        return []
    rows = bench_module(shape, kernel, budget=budget, alone=True)
    return [replace(row, who=kernel) for row in rows if row.what == BOTH or row.note]


# ---- pieces --------------------------------------------------------------------------------------


REPORTS: dict[str, Callable[[Target, float], Report]] = {
    "implementations": _implementations,
    "block-window": _block_window,
    "layers": _layers,
}


def _fused(shape: Shape, target: Target) -> str | None:
    """Return the fused kernel of this machine; interpreted ones are not measured."""
    fused = ("flash", "tokamax_flash", "cudnn", "cudnn_flash_te")
    names = () if target.platform == "cpu" else fused
    return next((name for name in names if refusal(name, shape.call(), target) is None), None)


def _curve(
    label: str, lengths: Sequence[int], rows: list[BenchRow], of: Callable[[BenchRow], float]
) -> Curve:
    kept = [(n, of(row)) for n, row in zip(lengths, rows, strict=True) if row.ms]
    return Curve(label, tuple(n for n, _ in kept), tuple(y for _, y in kept))


def _ms(row: BenchRow) -> float:
    return row.ms


def _mib(row: BenchRow) -> float:
    return row.peak / 2**20


def _columns(lines: Sequence[tuple[Any, ...]]) -> str:
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(str(c).rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines
    )
