"""The sampling settings that all families share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from maxattn.config import Section
from maxattn.errors import ConfigError
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.settings import Count, Dtype, NotNegative, Whole
from maxattn_examples.samplers.sampler import Given

from . import distilled
from .distilled import Distilled, list_errors, unmoved_errors
from .fast import FastSettings, settled


class SamplingSettings(Section):
    """How samples are drawn."""

    family: ClassVar[Family]
    cfg_key: ClassVar[str] = "guidance_scale"

    num_inference_steps: Count = 50
    """Steps from noise to sample."""
    guidance_scale: Annotated[float, Ge(0)] = 5.0
    """Classifier-free guidance away from the negative prompt; up to 1 is none, in half the time."""
    guidance_batched: bool = True
    """Prompt and negative prompt in one call of the model; false: two calls of half the rows."""
    timesteps: tuple[NotNegative, ...] | None = None
    """Times of the steps in the place of the sampler's own, from 1000 (noise) down."""
    sigmas: tuple[NotNegative, ...] | None = None
    """The same as shares of noise, from 1 down; of SDXL noise over signal, from 14.6 down."""
    distilled: str | None = None
    """A model or LoRA of few steps, of sample/distilled.yml, which sets the others."""
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

    @classmethod
    def settled(cls, values: Mapping[str, Any], given: Set[str]) -> Mapping[str, Any]:
        """Return values of unset keys that follow from a list of times or a distilled model."""
        row = cls._row(values)
        found = {} if row is None else row.settled(values, given, cls.cfg_key)
        own = Given.of({**values, **found})
        if own is not None and "num_inference_steps" not in given:
            found["num_inference_steps"] = len(own.values)
        for key in ("fast", "fast_2"):
            if (fast := values.get(key)) is not None:
                found[key] = settled(fast, cls.family)
        return found

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse unusable lists, and settings that differ from a distilled model's."""
        yield from list_errors(values)
        yield from distilled.name_errors(values["distilled"], cls.family)
        row = cls._row(values)
        if row is None or row.shift is None:
            yield from unmoved_errors(values)
        if row is not None:
            yield from row.errors(values, cls.cfg_key)

    @classmethod
    def _row(cls, values: Mapping[str, Any]) -> Distilled | None:
        row = distilled.of(values["distilled"])
        return row if row is not None and row.family == cls.family else None

    @property
    def cfg_scale(self) -> float:
        """The scale of classifier-free guidance; at most 1 turns it off."""
        return getattr(self, self.cfg_key)

    @property
    def guided(self) -> bool:
        """Whether the model is also called with the negative prompt, by diffusers' rule."""
        return self.cfg_scale > 1

    @property
    def distilled_as(self) -> Distilled | None:
        """The row of distilled.yml that `distilled` names."""
        return distilled.of(self.distilled)

    @property
    def sampler_changes(self) -> dict[str, Any]:
        """The keyword arguments of `scheduler.read` that the settings give."""
        row = self.distilled_as
        return {
            "given": Given.of(self.__dict__),
            "replaced": {} if row is None else row.options,
            "scales_noise": row is not None and row.scales_noise,
        }


class FlowSampling(SamplingSettings):
    """How models that predict velocities are sampled; a shift may move their times."""

    warped: bool | None = None
    """Whether timesteps or sigmas are the final values; false: timestep_shift moves them first."""
