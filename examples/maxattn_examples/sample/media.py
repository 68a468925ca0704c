"""Write videos and pictures to files."""

# imageio_ffmpeg is optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from maxattn.weights.replacing import replacing


def picture(pixels: UInt8[np.ndarray, "h w 3"], path: Path) -> Path:
    """Write a picture in the format of the path's suffix."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as beside:
        Image.fromarray(pixels).save(beside)
    return path


def video(frames: UInt8[np.ndarray, "F h w 3"], path: Path, fps: int) -> Path:
    """Write path.mp4 if ffmpeg is available and works, else pictures, and print why.

    Args:
        path: without a suffix.
        fps: frames per second.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, why = path.with_name(f"{path.name}.mp4"), "for an mp4, pip install imageio-ffmpeg"
    if (ffmpeg := find_ffmpeg()) is not None:
        why = _encode(ffmpeg, frames, file, fps)
    if not why:
        return file
    for i, frame in enumerate(frames):
        picture(frame, path / f"{i:04}.png")
    print(f"frames as pictures: {why}")
    return path


def find_ffmpeg() -> str | None:
    """Return the path of ffmpeg: imageio-ffmpeg's, else the machine's own."""
    if find_spec("imageio_ffmpeg") is None:
        return shutil.which("ffmpeg")
    import imageio_ffmpeg

    return imageio_ffmpeg.get_ffmpeg_exe()


def _encode(ffmpeg: str, frames: np.ndarray, file: Path, fps: int) -> str:
    """Write a video with ffmpeg; return its error message, empty on success."""
    # imageio's own writer runs Python between fork and exec, which jax, with its threads, warns of.
    _, height, width, _ = frames.shape
    raw = ("-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps))
    # 4:2:0, which every player takes, halves both sizes: an odd one is padded.
    even = ("-vf", "pad=ceil(iw/2)*2:ceil(ih/2)*2")
    out = (*even, "-c:v", "libx264", "-crf", "10", "-pix_fmt", "yuv420p")
    try:
        with replacing(file) as beside:
            command = [ffmpeg, "-y", "-loglevel", "error", *raw, "-i", "-", *out, str(beside)]
            subprocess.run(command, input=frames.tobytes(), capture_output=True, check=True)
    except subprocess.CalledProcessError as failed:
        said = failed.stderr.decode(errors="replace").strip().partition("\n")[0]
        return f"{ffmpeg} ends with {failed.returncode}: {said}"
    return ""


def to_pixels(values: np.ndarray) -> UInt8[np.ndarray, "..."]:
    """Scale -1..1 to 0..255."""
    return np.round(np.clip(values * 0.5 + 0.5, 0.0, 1.0) * 255.0).astype(np.uint8)
