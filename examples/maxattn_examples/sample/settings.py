"""The sampling settings that all families share; the section `fast`, its presets and curves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml
from annotated_types import Ge

from maxattn.config import ConfigErrors, Section
from maxattn.errors import ConfigError
from maxattn.steps import StepSettings
from maxattn_examples.common.pipeline_folder import Family
from maxattn_examples.common.settings import Count, Dtype, NotNegative, Whole
from maxattn_examples.samplers.sampler import Given

from . import distilled
from .distilled import Distilled, list_errors, unmoved_errors

PRESETS = Path(__file__).with_name("presets.yml")
CURVE = "sampling.fast.cache.magcache.ratios"


class FastSettings(StepSettings):
    """Settings that reduce the forwards of sampling; each is an approximation."""

    preset: Literal["gentle", "balanced", "fast"] | None = None
    """Settings of sample/presets.yml for the model's family, which other keys replace."""


def settled(fast: FastSettings, family: str) -> FastSettings:
    """Fill in the values of a preset for keys that are not set.

    Args:
        fast: `sampling.fast`.
        family: wan, sdxl or flux.
    """
    if fast.preset is None:
        return fast
    usual = dict(_presets()[family][fast.preset])
    if fast.cache is not None and fast.cache.kind not in (None, "shape"):
        del usual["cache"]  # its order and layers are of its own kind
    return FastSettings(**_over(usual, fast))


@cache
def _presets() -> Mapping[str, Mapping[str, Any]]:
    return yaml.safe_load(PRESETS.read_text("utf-8"))


def _over(usual: Mapping[str, Any], given: Section) -> dict[str, Any]:
    """Merge set values into default ones, section by section."""
    found = dict(usual)
    for key in given.model_fields_set:
        value, before = getattr(given, key), usual.get(key)
        if isinstance(value, Section) and isinstance(before, Mapping):
            value = _over(before, value)
        found[key] = value
    return found


# ---- curves --------------------------------------------------------------------------------------


def with_curve(
    fast: FastSettings | None, facts: Callable[[], Mapping[str, Any]]
) -> FastSettings | None:
    """Replace the name of a curve file by the ratios that it has.

    Args:
        facts: returns `curve_facts` of the run; called only if a file is named, because it reads
            the weights.

    Raises:
        ConfigErrors: the file cannot be read, or was measured with other facts.
    """
    how = None if fast is None or fast.cache is None else fast.cache.magcache
    if fast is None or fast.cache is None or how is None or not isinstance(how.ratios, str):
        return fast
    said = _read(how.ratios)
    if problems := [*differences(said, facts(), how.ratios)]:
        raise ConfigErrors(problems)
    try:
        own = how.replace(ratios=said["ratios"])
    except ConfigErrors as error:
        found = (ConfigError(CURVE, f"{how.ratios}: {x.value}", x.rule, x.remedy)
                 for x in error.problems)  # fmt: skip
        raise ConfigErrors(found) from None
    return fast.replace(cache=fast.cache.replace(magcache=own))


def differences(
    said: Mapping[str, Any], facts: Mapping[str, Any], name: str
) -> Iterator[ConfigError]:
    """Yield an error for each fact of a curve file that differs from the run's.

    Facts that the file leaves out are not compared, except weights: if the file has the hash of
    any,
    it was measured without those that it does not name.
    """
    theirs = {**dict.fromkeys([key for key in facts if key.startswith("checkpoint")]), "lora": []}
    theirs = {**(theirs if "checkpoint" in said else {}), **said, **said.get("sizes", {})}
    for key in (key for key in facts if key in theirs):
        ours, other = facts[key], theirs[key]
        alike = isinstance(ours, float) and isinstance(other, int | float)
        if (abs(ours - other) > 1e-6) if alike else ours != other:
            rule = f"it was measured with this {key}, and the run has {ours}"
            remedy = "measure a curve with examples/calibrate.py, or write a schedule"
            yield ConfigError(CURVE, f"{name}: {key} {other}", rule, remedy)


def _read(name: str) -> dict[str, Any]:
    try:
        said = yaml.safe_load(Path(name).read_text("utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        rule = f"it names the YAML file of a curve, and reading it failed: {error}"
        remedy = "name one, such as configs/curves/magcache_wan_2_1_t2v_1_3b.yml"
        raise ConfigError(CURVE, name, rule, remedy) from None
    if not isinstance(said, dict) or not isinstance(said.get("ratios"), list):
        rule = "it has a mapping, with the key ratios"
        raise ConfigError(CURVE, name, rule, "write `ratios: [1, 0.99, ...]`")
    return said


# ---- all of sampling -----------------------------------------------------------------------------


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
