"""The result of an audit by layer, head and kernel: as values, a table, JSON and a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from maxattn.errors import InputError
from maxattn.measuring.columns import columns
from maxattn.weights.replacing import replacing


class Column(NamedTuple):
    """A measure in tables: its title, whether it is a share, and what a layer's line has of it."""

    title: str
    is_share: bool = False
    of_heads: Literal["largest", "mean"] = "largest"


MEASURES = {
    "score": Column("score"), "bound": Column("bound"), "outside": Column("outside", True),
    "q_norm": Column("|q|"), "k_norm": Column("|k|"), "k_offset": Column("offset"),
    "k_outlier": Column("outlier"), "entropy": Column("entropy", False, "mean"),
    "top_tiles": Column("top 25%", True, "mean"), "time": Column("time", True, "mean"),
    "height": Column("height", True, "mean"), "width": Column("width", True, "mean"),
    "int8": Column("8 bits", True), "int8_centred": Column("centred", True),
}  # fmt: skip
PANELS = ("score", "k_offset", "k_outlier", "entropy", "top_tiles", "int8")


@dataclass(frozen=True)
class LayerAudit:
    """One attention call of a program, by the module's path, or "call 1"; [i] is a scan's step.

    `call` is its shape as text, `rotary` the style of its rotary embedding or "", and `heads` are
    the audited query heads. `measures` (docs/guide/audit.md) has a number for each of these heads,
    NaN where a measure does not apply; "error NAME" is a kernel's error against float32.
    """

    name: str
    call: str
    role: str
    kernel: str
    dtype: str
    rotary: str
    heads: tuple[int, ...]
    measures: Mapping[str, tuple[float, ...]]

    def over_heads(self, measure: str) -> float:
        """Return the largest value over heads, or the mean; NaN if no value is a number."""
        found = [x for x in self.measures.get(measure, ()) if x == x]
        if not found:
            return nan
        is_mean = measure in MEASURES and MEASURES[measure].of_heads == "mean"
        return sum(found) / len(found) if is_mean else max(found)


@dataclass(frozen=True)
class KernelAudit:
    """The error, time and memory of a kernel for all audited calls of one shape.

    `error` is the largest relative L2 error of a head against float32. `ms` is the time of a call
    on random operands, and `bytes` its arguments, results and temporaries. If they are missing,
    `note` says why.
    """

    call: str
    kernel: str
    is_planned: bool
    error: float = nan
    where: str = ""
    ms: float = nan
    bytes: int = 0
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """A finding: its kind, the layer, the heads (none for a whole layer), and the reason."""

    kind: str
    layer: str
    heads: tuple[int, ...]
    why: str

    def __str__(self) -> str:
        heads = ", ".join(map(str, self.heads))
        which = f", head{'s' if self.heads[1:] else ''} {heads}" if self.heads else ""
        return f"{self.layer}{which}: {self.why}"


@dataclass(frozen=True)
class Audit:
    """The result of `audit`: calls in the order in which they run, kernels, and findings.

    It prints as a table. Device, sample, and the grid with its windows are text.
    """

    device: str
    sample: str
    grid: str
    layers: tuple[LayerAudit, ...]
    kernels: tuple[KernelAudit, ...] = ()
    findings: tuple[Finding, ...] = ()

    def __str__(self) -> str:
        return self.table()

    def table(self, by_head: bool = False) -> str:
        """Return a line for each layer, or each head; then the kernels and the findings."""
        grid = [f"grid {self.grid}"] if self.grid else []
        titles = ["layer", "plan", *(column.title for column in MEASURES.values())]
        lines = [line for layer in self.layers for line in _lines(layer, by_head)]
        text = [f"audit on {self.device}: {self.sample}", *grid, "", *_shown([titles, *lines])]
        if self.kernels:
            rows = [("call", "kernel", "error", "worst at", "ms", "MiB")]
            for x in self.kernels:
                size = f"{x.bytes / 2**20:.1f}" if x.bytes else ""
                rows.append((x.call, x.kernel, _number(x.error), x.where, _number(x.ms), size))
            table = _shown(rows)
            notes = ["", *("the plan takes it" if x.is_planned else x.note for x in self.kernels)]
            text += ["", *(f"{a}  {b}".rstrip() for a, b in zip(table, notes, strict=True))]
        unsafe = [f"  {finding}" for finding in self.findings]
        return "\n".join([*text, "", "unsafe:" if unsafe else "unsafe: nothing was found", *unsafe])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; NaN becomes None, and infinity text."""
        return _plain(asdict(self))

    def picture(self, path: str | Path) -> Path:
        """Draw the main measures by layer and head as a PNG, and return its path.

        Raises:
            InputError: matplotlib is not installed.
        """
        return _draw(self, Path(path))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not isfinite(value):
        return None if value != value else str(value)
    return value


# ---- tables --------------------------------------------------------------------------------------


def _lines(layer: LayerAudit, by_head: bool) -> list[list[str]]:
    def cell(name: str, value: float) -> str:
        return f"{value:.1%}" if MEASURES[name].is_share and value == value else _number(value)

    if not by_head:
        return [[layer.name, layer.kernel, *(cell(x, layer.over_heads(x)) for x in MEASURES)]]
    none = (nan,) * len(layer.heads)
    return [
        [f"{layer.name} {head}", layer.kernel]
        + [cell(x, layer.measures.get(x, none)[i]) for x in MEASURES]
        for i, head in enumerate(layer.heads)
    ]


def _number(value: float) -> str:
    if value != value:
        return ""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.1e}"


def _shown(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a table without its empty columns."""
    kept = [i for i in range(len(lines[0])) if i < 2 or any(line[i] for line in lines[1:])]
    return columns([[line[i] for i in kept] for line in lines], 2)


def _draw(audit: Audit, path: Path) -> Path:
    try:
        matplotlib = import_module("matplotlib")
    except ImportError:
        rule, remedy = "a picture needs matplotlib", 'pip install "maxattn[plot]"'
        raise InputError("picture", path, rule, remedy) from None
    matplotlib.use("Agg")
    plt, colors = import_module("matplotlib.pyplot"), import_module("matplotlib.colors")
    heads = max(h for layer in audit.layers for h in layer.heads) + 1
    figure, axes = plt.subplots(2, 3, figsize=(15, 3 + 0.4 * len(audit.layers)), squeeze=False)
    for ax, measure in zip(axes.flat, PANELS, strict=True):
        cells = np.full((len(audit.layers), heads), nan)
        for line, layer in zip(cells, audit.layers, strict=True):
            line[list(layer.heads)] = layer.measures.get(measure, nan)
        known = cells[np.isfinite(cells)]
        is_wide = known.size and 0 < 30 * known.min() < known.max()
        shown = ax.imshow(cells, aspect="auto", norm=colors.LogNorm() if is_wide else None)
        figure.colorbar(shown, ax=ax)
        ax.set(title=MEASURES[measure].title, xlabel="head")
        ax.set_yticks(range(len(audit.layers)), [layer.name for layer in audit.layers], fontsize=6)
    figure.suptitle(f"audit on {audit.device}", fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        figure.savefig(beside, format="png")
    plt.close(figure)
    return path
