"""The settings that sampling has in common, whatever is drawn."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from common.settings import Count, Dtype, Whole
from fast.settings import FastSettings

from maxattn.config import Section


class SamplingSettings(Section):
    """Hold how samples are drawn."""

    num_inference_steps: Count = 50
    """Steps from noise to sample."""
    guidance_scale: Annotated[float, Ge(0)] = 5.0
    """Classifier-free guidance away from the negative prompt; 1 is none, in half the time."""
    guidance_batched: bool = True
    """Prompt and negative prompt in one call of the model; false: two calls of half the rows."""
    prompt: str | None = None
    """What to draw; text encoders need maxattn[torch]. Unset where an embeddings file says it."""
    negative_prompt: str | None = None
    """What guidance leads away from; unset is the empty prompt."""
    per_prompt: Count = 1
    """Samples of each prompt, each from noise of its own."""
    count: Count = 1
    """Samples of a picture while training, of the first texts of the data."""
    weights_dtype: Dtype = "bfloat16"
    """Of the parameters while sampling, except norms; model.dtype is the computation's."""
    torch_device: str = "cpu"
    """Where text encoders and VAE run: cpu or cuda."""
    compiler_options: tuple[str, ...] = ()
    """Of XLA, for a step: NAME=VALUE, the names as in XLA_FLAGS. On a GPU these stand before them:
    xla_gpu_dot_merger_threshold_mb=0, xla_gpu_enable_triton_gemm=false."""
    seed: Whole = 0
    """Of the noise."""
    fast: FastSettings | None = None
    """Fewer forwards, approximately; null computes all of them."""

    @property
    def cfg_scale(self) -> float:
        """The scale of classifier-free guidance; 1 is none."""
        return self.guidance_scale
