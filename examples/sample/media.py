"""Videos and pictures on disk."""

# imageio is optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8


def picture(pixels: UInt8[np.ndarray, "h w 3"], path: Path) -> Path:
    """Write a picture; the ending of the path says how."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def video(frames: UInt8[np.ndarray, "F h w 3"], path: Path, fps: int) -> Path:
    """Write a video: path.mp4 where imageio and its ffmpeg are installed, else pictures.

    Args:
        frames: of the video.
        path: without an ending.
        fps: frames a second.
    """
    if find_spec("imageio") is None or find_spec("imageio_ffmpeg") is None:
        for i, frame in enumerate(frames):
            picture(frame, path / f"{i:04}.png")
        print('frames as pictures: for an mp4, pip install "imageio[ffmpeg]"')
        return path
    import imageio.v2 as imageio

    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.with_name(f"{path.name}.mp4")
    how: dict[str, Any] = {"codec": "libx264", "quality": 8, "macro_block_size": 1}
    with imageio.get_writer(file, fps=fps, **how) as writer:
        for frame in frames:
            writer.append_data(frame)
    return file


def to_pixels(values: np.ndarray) -> UInt8[np.ndarray, "..."]:
    """Turn -1..1 into 0..255."""
    return np.round(np.clip(values * 0.5 + 0.5, 0.0, 1.0) * 255.0).astype(np.uint8)
