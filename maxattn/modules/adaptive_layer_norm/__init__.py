"""The adaptive layer norm of diffusion transformers, with the sum before it: one kernel on Hopper.

Elsewhere, and in gradients, XLA computes the same steps.
"""

from maxattn.modules.adaptive_layer_norm.norm import GatedBranch, adaptive_norm, gated_sum
from maxattn.modules.adaptive_layer_norm.vectors import ModulationRow

__all__ = ["GatedBranch", "ModulationRow", "adaptive_norm", "gated_sum"]
