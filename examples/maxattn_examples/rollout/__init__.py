"""Video of any length, block by block: one compiled program a block."""

from .denoising import Denoising
from .reel import Reel
from .reel_file import load, save
from .rollout import Rollout

__all__ = ["Denoising", "Reel", "Rollout", "load", "save"]
