"""Pictures of a loss curve, and of videos: as a GIF, or frame by frame as a PNG."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from maxattn.weights.replacing import replacing

Videos = Float[np.ndarray, "n F H W"]

PAPER, LINE, WORDS, MARKED = "white", (225, 225, 225), (60, 60, 60), (190, 30, 45)
MARGIN = 8  # pixels between cells
TEXT = 12  # height of the labels


def loss_curve(losses: Sequence[float], path: Path) -> Path:
    """Draw the loss of every step, and its running average, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    _draw_losses(axes, losses)
    with replacing(path) as beside:
        figure.savefig(beside, dpi=120)
    plt.close(figure)
    return path


def _draw_losses(axes: Any, losses: Sequence[float]) -> None:
    count, window = len(losses), max(1, min(50, len(losses) // 4))
    smooth = np.convolve(losses, np.ones(window) / window, mode="valid")
    thin: dict[str, Any] = {"color": "tab:blue", "alpha": 0.25, "lw": 0.8, "label": "each step"}
    thick: dict[str, Any] = {"color": "tab:blue", "lw": 1.6, "label": f"average of {window}"}
    axes.semilogy(np.arange(1, count + 1), losses, **thin)
    axes.semilogy(np.arange(window, count + 1), smooth, **thick)
    title = f"loss after {count} steps: {smooth[-1]:.4f}"
    axes.set(xlabel="step", ylabel="flow-matching loss", title=title)
    axes.grid(which="both", alpha=0.3)
    axes.legend()


def contact_sheet(
    videos: Videos, prompts: Sequence[str], path: Path, marked: Collection[str] = (), scale: int = 4
) -> Path:
    """Lay out videos frame by frame, each below its prompt.

    Args:
        videos: ink from 0 to 16.
        marked: prompts to write in red, with a star.
        scale: screen pixels of one pixel.
    """
    strips = np.stack([np.concatenate(list(_framed(video, scale)), axis=1) for video in videos])
    with replacing(path) as beside:
        _sheet(strips, prompts, marked).save(beside)
    return path


def moving(
    videos: Videos,
    prompts: Sequence[str],
    path: Path,
    marked: Collection[str] = (),
    scale: int = 8,
    then: tuple[int, Sequence[str]] | None = None,
) -> Path:
    """Write a GIF in which all videos play at once; other arguments as for `contact_sheet`.

    Args:
        then: a frame number and the prompts from that frame on, written in red.
    """
    framed = np.stack([np.stack(list(_framed(video, scale))) for video in videos])
    cut, others = then or (framed.shape[1], prompts)
    wide = _width([*prompts, *others])
    first = [_sheet(frame, prompts, marked, wide) for frame in framed.swapaxes(0, 1)[:cut]]
    second = [_sheet(frame, others, marked, wide, MARKED) for frame in framed.swapaxes(0, 1)[cut:]]
    sheets = [sheet.quantize(64) for sheet in (*first, *second)]
    # The last frame stays a little longer, so that the jump back to the first is seen as one.
    durations = [200] * (len(sheets) - 1) + [600]
    how: dict[str, Any] = {"append_images": sheets[1:], "duration": durations, "loop": 0}
    with replacing(path) as beside:
        sheets[0].save(beside, save_all=True, **how)
    return path


def _framed(video: Float[np.ndarray, "F H W"], scale: int) -> Iterable[UInt8[np.ndarray, "h w 3"]]:
    """Enlarge each frame, dark ink on white, with a thin line around it."""
    for frame in video:
        grey = np.round(255 * (1 - frame / INK)).astype(np.uint8).repeat(scale, 0).repeat(scale, 1)
        yield np.pad(np.stack([grey] * 3, -1), ((1, 1), (1, 1), (0, 0)), constant_values=LINE[0])


def _width(labels: Sequence[str]) -> int:
    """Return the width of the longest label in pixels."""
    font = ImageFont.load_default(size=TEXT)
    return max(math.ceil(font.getlength(label)) for label in labels)


def _sheet(
    cells: UInt8[np.ndarray, "n h w 3"],
    prompts: Sequence[str],
    marked: Collection[str],
    least: int = 0,
    words: tuple[int, int, int] = WORDS,
) -> Image.Image:
    """Lay out cells in a grid, each below its label; cells are at least `least` pixels wide."""
    count, high, wide, _ = cells.shape
    columns = 4 if count % 4 == 0 else min(count, 5)
    labels = [f"{prompt} *" if prompt in marked else prompt for prompt in prompts]
    font = ImageFont.load_default(size=TEXT)
    wide = max(wide, least, _width(labels)) + MARGIN
    high += TEXT + 4 + MARGIN
    size = (columns * wide + MARGIN, math.ceil(count / columns) * high + MARGIN)
    sheet = Image.new("RGB", size, PAPER)
    draw = ImageDraw.Draw(sheet)
    for i, (cell, label) in enumerate(zip(cells, labels, strict=True)):
        x, y = MARGIN + (i % columns) * wide, MARGIN + (i // columns) * high
        draw.text((x, y), label, fill=MARKED if prompts[i] in marked else words, font=font)
        sheet.paste(Image.fromarray(cell), (x, y + TEXT + 4))
    return sheet


INK = 16.0  # the darkest value of a scan


def from_latents(latents: Float[np.ndarray, "C F h w"]) -> Float[np.ndarray, "F H W"]:
    """Turn channels into the pixels of a square, and return ink from 0 to 16."""
    side = round(len(latents) ** 0.5)
    video = rearrange(np.asarray(latents), "(y x) F h w -> F (h y) (w x)", y=side, x=side)
    return np.clip((video + 1.0) * (INK / 2), 0.0, INK)
