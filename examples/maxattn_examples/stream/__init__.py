"""Sample videos of any length block by block, with one compiled program per block."""

from .denoising import Denoising
from .reel import Reel, load, save
from .rollout import Rollout

__all__ = ["Denoising", "Reel", "Rollout", "load", "save"]
