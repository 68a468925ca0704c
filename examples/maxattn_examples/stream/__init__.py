"""Video of any length, block by block: one compiled program a block."""

from .denoising import Denoising
from .reel import Reel, load, save
from .rollout import Rollout

__all__ = ["Denoising", "Reel", "Rollout", "load", "save"]
