"""The VAE of pictures, run by torch from a folder."""

# torch and its packages are optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from .media import to_pixels


def decode(
    folder: Path, latents: Float[np.ndarray, "B C h w"], device: str
) -> list[UInt8[np.ndarray, "H W 3"]]:
    """Decode latents into pictures, one after the other.

    In float32: float16 overflows in SDXL's VAE.

    Args:
        folder: with vae.
        latents: as the model sees them.
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
        found.append(to_pixels(picture.float().cpu().numpy().transpose(1, 2, 0)))
    return found


def _unscaled(x: Any, config: Any) -> Any:
    """Undo the scale of the latents, and where the VAE has them their shift, or mean and spread."""
    import torch

    x = x / config.get("scaling_factor") + (config.get("shift_factor") or 0.0)
    mean, std = config.get("latents_mean"), config.get("latents_std")
    if mean is None or std is None:
        return x
    mean, std = (torch.tensor(n, device=x.device).view(1, -1, 1, 1) for n in (mean, std))
    return x * std + mean
