"""The parts of a pipeline that run in torch, and files of pictures and videos."""

# torch and its packages are optional: types are checked without.
# pyright: reportMissingImports=false
# imageio_ffmpeg is optional: types are checked without.

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from maxattn.errors import ConfigError
from maxattn.weights.replacing import replacing
from maxattn_examples.common.pipeline_folder import lacking

INSTALL = 'pip install "maxattn[torch]"'


class Needs(NamedTuple):
    """The requirements of a computation in torch.

    Args:
        parts: folders of the pipeline.
        package: required beside torch.
        instead: the alternative, for the error if torch is not installed.
    """

    parts: tuple[str, ...]
    package: str
    instead: str


def without_torch(option: str, what: str, model: Path, needs: Needs) -> Iterator[ConfigError]:
    """Yield an error if torch, a package or a part is missing; it names both remedies.

    Args:
        option: the command-line option.
        what: the computation, in words.
        model: the pipeline's folder.
    """
    parts, package, instead = needs
    if missing := [name for name in ("torch", package) if find_spec(name) is None]:
        rule, remedy = f"{what} is done by torch and {package}", f"{INSTALL}, or {instead}"
        yield ConfigError(option, f"{' and '.join(missing)} not installed", rule, remedy)
    elif lost := lacking(model, parts):
        value = f"{model} without {', '.join(lost)}"
        remedy = f"fetch the whole folder, or {instead}"
        rule = f"{what} needs these parts of a pipeline: {', '.join(parts)}"
        yield ConfigError(option, value, rule, remedy)


def device_errors(option: str, device: str) -> Iterator[ConfigError]:
    """Yield an error if torch cannot use a device; none if torch is not installed.

    Args:
        option: the command-line option, or the setting.
        device: torch's name.
    """
    if device == "cpu" or find_spec("torch") is None:
        return
    import torch

    try:
        torch.zeros(1, device=device).tolist()
    except (AssertionError, RuntimeError) as error:  # torch's own, of devices that are not there
        said = str(error).strip().partition("\n")[0].rstrip(".")
        rule = f"torch must find the device on this machine, and failed: {said}"
        remedy = "use cpu, or cuda if there is an NVIDIA GPU and torch is built for CUDA"
        yield ConfigError(option, device, rule, remedy)


class TextEncoder:
    """A tokenizer and a text encoder of a pipeline's folder.

    Args:
        folder: the pipeline's.
        kind: the encoder's class in transformers.
        which: the suffix of the parts' names, such as "_2".
        dtype: of the encoder; "auto" is that of its file.
        device: cpu or cuda.
    """

    def __init__(
        self, folder: Path, kind: str, device: str, which: str = "", dtype: Any = "auto"
    ) -> None:
        import transformers

        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder / f"tokenizer{which}")
        encoder = getattr(transformers, kind)
        encoder = encoder.from_pretrained(folder / f"text_encoder{which}", dtype=dtype)
        self.encoder, self.device = encoder.to(device).eval(), device

    def tokens(self, prompts: Sequence[str], length: int | None = None) -> Any:
        """Return ids and mask of prompts, padded and cut to `length`, default the tokenizer's."""
        length = length or self.tokenizer.model_max_length
        how: dict[str, Any] = {"padding": "max_length", "max_length": length, "truncation": True}
        return self.tokenizer(list(prompts), return_tensors="pt", **how).to(self.device)

    def __call__(self, *inputs: Any, **how: Any) -> Any:
        """Run the encoder without gradients."""
        import torch

        with torch.no_grad():
            return self.encoder(*inputs, **how)


def to_numpy(x: Any) -> np.ndarray:
    """Copy a torch tensor to float32."""
    return x.float().cpu().numpy()


def negated(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Split off the last batch row of each array, the negative prompt's."""
    negative = {f"negative_{name}": array[-1:] for name, array in arrays.items()}
    return {name: array[:-1] for name, array in arrays.items()} | negative


def pictures(
    folder: Path, latents: Float[np.ndarray, "B C h w"], device: str
) -> list[UInt8[np.ndarray, "H W 3"]]:
    """Decode latents with the folder's vae, one picture at a time, in float32.

    In float16 SDXL's VAE overflows.

    Args:
        folder: with vae.
        latents: scaled.
        device: cpu or cuda.
    """
    import torch
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    vae = vae.to(device).eval()
    found = []
    for one in latents:
        x = _unscaled(torch.tensor(one[None]).to(device), vae.config)
        with torch.no_grad():
            picture = vae.decode(x, return_dict=False)[0][0]
        # [3, H, W] -> [H, W, 3]
        found.append(to_pixels(to_numpy(picture).transpose(1, 2, 0)))
    return found


def _unscaled(x: Any, config: Any) -> Any:
    """Undo the scale of latents, and their shift, or mean and standard deviation, if any."""
    import torch

    x = x / config.get("scaling_factor") + (config.get("shift_factor") or 0.0)
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is None or std is None:
        return x
    mean, std = (torch.tensor(n, device=x.device).view(1, -1, 1, 1) for n in (mean, std))
    return x * std + mean


# ---- pictures and videos on disk -----------------------------------------------------------------


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
