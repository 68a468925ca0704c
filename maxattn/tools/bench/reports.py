"""The tables and pictures of three well-known pages on attention, made of our kernels on this
machine.

implementations  naive, tiled and flash attention: time, memory, speedup, by length (16 heads of 64)
block-window     forward and backward by number of tokens: a window of 16 blocks of 256 tokens,
beside a dense mask layers           one training step of a self-attention layer by kernel: time and
memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from maxattn.decide import refusal
from maxattn.kernels import KERNELS
from maxattn.masks import BlockSlidingWindow
from maxattn.target import Target
from maxattn.tools.bench.measure import BACKWARD, BOTH, FORWARD, Row, bench, too_large
from maxattn.tools.bench.module import bench_module
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
    rows: tuple[Row, ...]
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
    rows: list[Row] = []
    for length in lengths:
        rows += bench(
            read(f"1,{length},{length},16,64"), tuple(names.values()), False, target, budget
        )
    at = {(row.shape, row.who): row for row in rows if row.what == FORWARD}
    found = {label: [at[f"1,{n},{n},16,64", who] for n in lengths] for label, who in names.items()}
    tables = [
        _compared(f"{length} tokens, 16 heads of 64, forward", found, i)
        for i, length in enumerate(lengths)
    ]
    panels = tuple(
        (title, unit, tuple(_curve(label, lengths, each, of) for label, each in found.items()))
        for title, unit, of in (("time, forward", "ms", _ms), ("memory", "MiB", _mib))
    )
    return Report("implementations", "\n\n".join(tables), tuple(rows), panels)


def _compared(title: str, found: dict[str, list[Row]], i: int) -> str:
    naive = found["naive"][i].ms
    lines = [("implementation", "kernel", "time (ms)", "memory (MiB)", "speedup")]
    for label, rows in found.items():
        row = rows[i]
        speedup = f"{naive / row.ms:.1f}x" if naive and row.ms else "-"
        lines.append(
            (label, row.who, f"{row.ms:.3f}" if row.ms else "-", f"{_mib(row):.0f}", speedup)
        )
    return f"{title}\n{_columns(lines)}"


# ---- block window --------------------------------------------------------------------------------


def _block_window(target: Target, budget: float) -> Report:
    small = target.platform == "cpu"
    block, window = (16, 4) if small else (256, 16)
    lengths = (64, 128) if small else (4096, 8192, 16384, 32768, 65536)
    mask = BlockSlidingWindow(block, window)
    rows: list[Row] = []
    for n in lengths:
        shape = replace(read(f"1,{n},{n},12,64"), mask=mask)
        fused = [
            name
            for name in ("flash", "tokamax_flash")
            if not small and refusal(name, shape.call(), target) is None
        ]
        dense = [] if too_large(NAIVE, shape) else [NAIVE]
        rows += bench(shape, (*(fused or [TILED]), *dense), False, target, budget)
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.ms:
            found.setdefault((row.who, row.what), []).append(row)
    lines = [("tokens", "kernel", "pass", "time (ms)", "TFLOP/s", "memory (MiB)")]
    lines += [
        (
            row.shape.split(",")[1],
            row.who,
            row.what,
            f"{row.ms:.3f}",
            f"{row.tflops:.1f}",
            f"{_mib(row):.0f}",
        )
        for row in rows
        if row.ms
    ]
    panels = tuple((f"{what} time", "ms", _by_tokens(found, what)) for what in (FORWARD, BACKWARD))
    head = f"block window: each token sees {window} blocks of {block} tokens; 12 heads of 64"
    return Report("block-window", f"{head}\n{_columns(lines)}", tuple(rows), panels)


def _by_tokens(found: dict[tuple[str, str], list[Row]], what: str) -> tuple[Curve, ...]:
    return tuple(
        Curve(
            who, tuple(int(row.shape.split(",")[1]) for row in rows), tuple(row.ms for row in rows)
        )
        for (who, of), rows in found.items()
        if of == what
    )


# ---- layers --------------------------------------------------------------------------------------


def _layers(target: Target, budget: float) -> Report:
    shapes = (
        [read("1,256,256,4,64")]
        if target.platform == "cpu"
        else [SHAPES["sdxl-64"], SHAPES["wan-1.3b-480p"]]
    )
    rows: list[Row] = []
    for shape in shapes:
        for name in KERNELS:
            if too_large(name, shape):
                rows.append(Row(shape.name, name, BOTH, note="left out: too much memory or time"))
            elif refusal(name, shape.call(), target) is None:
                rows += [replace(row, who=name) for row in _step(shape, name, budget)]
    lines = [("layer", "attention", "step (ms)", "memory (GiB)")]
    for row in rows:
        memory = f"{row.peak / 2**30:.2f}" if row.ms else "-"
        lines.append((row.shape, row.who, f"{row.ms:.2f}" if row.ms else row.note[:60], memory))
    bars = tuple((f"{row.shape} {row.who}", row.ms, row.peak / 2**30) for row in rows if row.ms)
    head = (
        "one training step of a self-attention layer: projections, norms, rotary embedding,"
        " attention, output"
    )
    return Report("layers", f"{head}\n{_columns(lines)}", tuple(rows), bars=bars)


def _step(shape: Shape, kernel: str, budget: float) -> list[Row]:
    rows = bench_module(shape, kernel, budget=budget, alone=True)
    return [row for row in rows if row.what == BOTH or row.note]


# ---- pieces --------------------------------------------------------------------------------------


REPORTS: dict[str, Callable[[Target, float], Report]] = {
    "implementations": _implementations,
    "block-window": _block_window,
    "layers": _layers,
}


def _fused(shape: Shape, target: Target) -> str | None:
    """Return the fused kernel of this machine; interpreted ones are not measured."""
    names = (
        () if target.platform == "cpu" else ("flash", "tokamax_flash", "cudnn", "cudnn_flash_te")
    )
    return next((name for name in names if refusal(name, shape.call(), target) is None), None)


def _curve(
    label: str, lengths: Sequence[int], rows: list[Row], of: Callable[[Row], float]
) -> Curve:
    kept = [(n, of(row)) for n, row in zip(lengths, rows, strict=True) if row.ms]
    return Curve(label, tuple(n for n, _ in kept), tuple(y for _, y in kept))


def _ms(row: Row) -> float:
    return row.ms


def _mib(row: Row) -> float:
    return row.peak / 2**20


def _columns(lines: Sequence[tuple[Any, ...]]) -> str:
    widths = [max(len(str(line[i])) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(str(c).rjust(w) for c, w in zip(line, widths, strict=True)) for line in lines
    )
