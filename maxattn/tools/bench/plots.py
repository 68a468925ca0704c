"""Pictures of the reports, by matplotlib (extra `[plot]`)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from maxattn.errors import InputError
from maxattn.tools.bench.reports import Curve, Report

INCHES, DPI = (4.2, 3.2), 110


def draw(report: Report, device: str, path: Path) -> None:
    """Draw a report as a PNG.

    Args:
        report: from `maxattn.tools.bench.reports`.
        device: for the title.
        path: of the picture.

    Raises:
        InputError: without matplotlib.
    """
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        raise InputError(
            "--pictures",
            path.parent,
            "pictures are drawn by matplotlib",
            'pip install "maxattn[plot]"',
        ) from None
    matplotlib.use("Agg")
    plt = import_module("matplotlib.pyplot")
    panels = 2 if report.bars else len(report.panels)
    figure, axes = plt.subplots(1, panels, figsize=(INCHES[0] * panels, INCHES[1]), squeeze=False)
    if report.bars:
        _bars(report, axes[0])
    for ax, (title, unit, curves) in zip(axes[0], report.panels, strict=False):
        _curves(ax, title, unit, curves)
    figure.suptitle(f"{report.name}, {device}", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)
    plt.close(figure)


def _curves(ax: Any, title: str, unit: str, curves: tuple[Curve, ...]) -> None:
    for curve in curves:
        ax.plot(curve.tokens, curve.values, marker="o", markersize=3, label=curve.label)
    ax.set(xscale="log", yscale="log", xlabel="tokens", ylabel=unit, title=title)
    ax.set_xscale("log", base=2)
    ax.grid(True, which="both", alpha=0.3)
    ax.legend(fontsize=7)


def _bars(report: Report, axes: Any) -> None:
    labels = [label for label, _, _ in report.bars]
    for ax, which, unit in zip(axes, (1, 2), ("ms a step", "GiB"), strict=True):
        ax.barh(labels, [bar[which] for bar in report.bars])
        ax.invert_yaxis()
        ax.set(xlabel=unit)
        ax.tick_params(axis="y", labelsize=6)
