"""Draws the quality of streamed digits against the number of the block."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxattn.weights.replacing import replacing

from .drift import Drift

NAMES = {
    "digit": "right digits",
    "direction": "right directions",
    "phase": "pixels off its place",
    "ink": "ink / ink of scans",
}


def quality(found: Mapping[str, Drift], path: Path, switch: int = 0) -> Path:
    """Draw a panel for each number, a line for each run, and where the prompt changes.

    Args:
        found: runs by name.
        path: of the PNG.
        switch: blocks before the change; 0 for none.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for panel, (name, label) in zip(panels.flat, NAMES.items(), strict=True):
        _panel(panel, {run: drift.values[name] for run, drift in found.items()}, label)
        if switch:
            panel.axvline(switch + 0.5, ls=":", color="black", label="another prompt")
    panels.flat[0].legend(fontsize="small")
    with replacing(path) as beside:
        figure.savefig(beside, dpi=110)
    plt.close(figure)
    return path


def _panel(panel: Any, lines: Mapping[str, tuple[float, ...]], label: str) -> None:
    for run, numbers in lines.items():
        marker = "o" if len(numbers) == 1 else ""
        panel.plot(range(1, len(numbers) + 1), numbers, label=run, marker=marker, lw=1.2)
    panel.set(xlabel="block", ylabel=label, xscale="log")
    panel.grid(alpha=0.3)
