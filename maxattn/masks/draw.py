"""Draw masks: as characters for the terminal, or as a PNG file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from maxattn.errors import InputError, Unsupported
from maxattn.jax_private.mesh import is_tracer
from maxattn.masks import blocks

if TYPE_CHECKING:
    from jaxtyping import Float

    from maxattn.masks.base import Mask

PIXELS = 512  # most cells in a row or column of a plot
SAMPLES = 8  # most queries and most keys that are evaluated per cell, if a mask has arrays
SHADES = "░▒▓"


def show(mask: Mask, q_len: int, kv_len: int, width: int, batch: int, head: int) -> str:
    """Draw a bound mask: one character per pair if that fits the width, else shades of density."""
    _check_lengths(q_len, kv_len)
    if width < 8:
        rule = "a picture must have at least 8 characters in a line"
        raise InputError("width", width, rule, "give a larger width")
    period = mask.period()
    cell = tall = _aligned(-(-max(q_len, kv_len) // width), period)
    # A character is about twice as tall as wide, so a cell has twice as many queries as keys,
    # unless a cell would then mix blocks of the mask.
    mixes = _on_grid(cell, period) and not (period and period % (2 * cell) == 0)
    if cell > 1 and not mixes:
        tall = 2 * cell
    shares = density(mask, tall, cell, q_len, kv_len, batch, head)
    gap = " " if tall == cell and 2 * shares.shape[1] <= width else ""
    scale = "" if cell == 1 else f", one character is {tall} queries by {cell} keys"
    lines = [repr(mask), f"{q_len} queries down, {kv_len} keys across{scale}{_caution(mask)}"]
    for row in shares.tolist():
        shade = (SHADES[min(int(share * len(SHADES)), len(SHADES) - 1)] for share in row)
        drawn = zip(row, shade, strict=True)
        lines.append(gap.join({0.0: "·", 1.0: "█"}.get(share, x) for share, x in drawn))
    return "\n".join(lines)


def _aligned(cell: int, period: int | None) -> int:
    """Widen a cell, to at most twice its size, to a divisor or multiple of the mask's block."""
    wider = range(cell, 2 * cell + 1) if cell > 1 else ()
    return next((n for n in wider if _on_grid(n, period)), cell)


def _on_grid(cell: int, period: int | None) -> bool:
    return period is not None and (period % cell == 0 or cell % period == 0)


def plot(mask: Mask, path: Path, q_len: int, kv_len: int, batch: int, head: int) -> Path:
    """Draw a bound mask into a PNG file, with at most 512 cells per side at any length."""
    from maxattn.weights.replacing import replacing

    _check_lengths(q_len, kv_len)
    if path.suffix.lower() != ".png":
        raise InputError("path", path, "the path must end in .png", "give a name that ends in .png")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as missing:
        rule, remedy = "drawing a picture needs matplotlib", 'pip install "maxattn[plot]"'
        raise Unsupported("plot", str(path), rule, f"{remedy}, or use show()") from missing
    cell = _aligned(-(-max(q_len, kv_len) // PIXELS), mask.period())
    shares = density(mask, cell, cell, q_len, kv_len, batch, head)
    figure = Figure(figsize=(6, 6), layout="constrained")
    axes = FigureCanvasAgg(figure).figure.add_subplot()
    edges = (0, kv_len, q_len, 0)
    look: dict[str, Any] = {"cmap": "Blues", "interpolation": "nearest", "aspect": "auto"}
    axes.imshow(shares, vmin=0, vmax=1, extent=edges, **look)
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(f"{mask!r}{_caution(mask)}", fontsize=9, wrap=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=120, format="png")
    return path


def _check_lengths(q_len: int, kv_len: int) -> None:
    for name, word, length in (("q_len", "query", q_len), ("kv_len", "key", kv_len)):
        if length < 1:
            raise InputError(name, length, f"a picture needs at least one {word}", "give 1 or more")


def density(
    mask: Mask, cell_q: int, cell_kv: int, q_len: int, kv_len: int, batch: int = 0, head: int = 0
) -> Float[np.ndarray, "QC KC"]:
    """Return the share of allowed pairs in each cell.

    Shares are exact for masks without arrays and with few intervals, and for cells of up to 8 x 8;
    other shares are estimates from samples. Arrays without values (traced) allow every pair.
    """
    if _known(mask) and not mask.has_exact_intervals:
        return _sampled(mask, cell_q, cell_kv, q_len, kv_len, batch, head)
    counts = blocks.count(mask, cell_q, cell_kv, q_len, kv_len)
    return counts / blocks.areas(cell_q, cell_kv, q_len, kv_len)


def _sampled(
    mask: Mask, cell_q: int, cell_kv: int, q_len: int, kv_len: int, batch: int, head: int
) -> np.ndarray:
    here = jax.tree.map(np.asarray, mask)
    (q_idx, q_starts), (kv_idx, kv_starts) = _samples(cell_q, q_len), _samples(cell_kv, kv_len)
    out = here.allowed(q_idx, kv_idx)
    batches, heads = out.shape[:2]
    for name, index, size in (("batch", batch, batches), ("head", head, heads)):
        if not 0 <= index < size and size > 1:
            remedy = f"give {name} from 0 to {size - 1}"
            raise InputError(name, index, f"the mask's size along {name} is {size}", remedy)
    table = np.broadcast_to(out[batch % batches, head % heads], (len(q_idx), len(kv_idx)))
    by_row = np.add.reduceat(table, q_starts, axis=0, dtype=np.int32)
    sums = np.add.reduceat(by_row, kv_starts, axis=1)
    sizes = np.outer(np.diff([*q_starts, len(q_idx)]), np.diff([*kv_starts, len(kv_idx)]))
    return sums / sizes


def _samples(cell: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    step = -(-cell // SAMPLES)
    picked = [np.arange(start, min(start + cell, length), step) for start in range(0, length, cell)]
    return np.concatenate(picked), np.cumsum([0, *(len(p) for p in picked[:-1])])


def _known(mask: Mask) -> bool:
    return not any(
        isinstance(x, jax.ShapeDtypeStruct) or is_tracer(x) for x in jax.tree.leaves(mask)
    )


def _caution(mask: Mask) -> str:
    return "" if _known(mask) else ", arrays unknown: an upper bound"
