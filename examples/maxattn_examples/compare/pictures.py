"""How far the pictures of two runs are apart: PSNR, SSIM, and LPIPS where that package is there.

Sources: Wang et al. 2004 (SSIM), https://doi.org/10.1109/TIP.2003.819861; Zhang et al. 2018
(LPIPS), https://arxiv.org/abs/1801.03924.
"""

# lpips and torch are optional: types are checked without.
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

import numpy as np
from jaxtyping import Float, UInt8

Pixels = UInt8[np.ndarray, "... H W 3"]
SIGMA, WIDTH = 1.5, 11  # of the window of SSIM
SMALL = (0.01 * 255) ** 2, (0.03 * 255) ** 2
MOST_FRAMES = 16  # of a video that LPIPS looks at, spread over it


def scores(ours: list[Pixels], dense: list[Pixels]) -> Mapping[str, Float[np.ndarray, " n"]]:
    """Score the pictures or videos of a run against those of the dense one, one by one."""
    pairs = list(zip(ours, dense, strict=True))
    found = {
        "PSNR of pixels": np.array([psnr(a, b) for a, b in pairs]),
        "SSIM": np.array([ssim(a, b) for a, b in pairs]),
    }
    if find_spec("lpips") is not None:
        found["LPIPS"] = np.array([lpips(a, b) for a, b in pairs])
    return found


def psnr(a: Pixels, b: Pixels) -> float:
    """Return the peak signal-to-noise ratio of pixels, in dB; 100 where they are equal."""
    error = np.square(a.astype(np.float64) - b).mean()
    return 100.0 if error == 0 else float(10 * np.log10(255.0**2 / error))


def ssim(a: Pixels, b: Pixels) -> float:
    """Return the structural similarity of pixels, mean over frames and colours."""
    from scipy.ndimage import gaussian_filter

    sigma = (0,) * (a.ndim - 3) + (SIGMA, SIGMA, 0)
    radius = (WIDTH - 1) / 2 / SIGMA

    def smooth(x: np.ndarray) -> np.ndarray:
        return gaussian_filter(x, sigma, truncate=radius)

    x, y = (np.asarray(n, np.float64) for n in (a, b))
    mean_x, mean_y = smooth(x), smooth(y)
    var_x, var_y = smooth(x * x) - mean_x**2, smooth(y * y) - mean_y**2
    both = smooth(x * y) - mean_x * mean_y
    c1, c2 = SMALL
    top = (2 * mean_x * mean_y + c1) * (2 * both + c2)
    return float((top / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))).mean())


def lpips(a: Pixels, b: Pixels) -> float:
    """Return the learned distance of pictures, mean over frames of a video."""
    import torch
    from lpips import LPIPS

    def frames(x: np.ndarray) -> torch.Tensor:
        x = x.reshape(-1, *x.shape[-3:])
        some = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST_FRAMES)).astype(int))
        return torch.tensor(x[some]).permute(0, 3, 1, 2).float() / 127.5 - 1

    with torch.no_grad():
        return float(LPIPS(net="alex", verbose=False)(frames(a), frames(b)).mean())
