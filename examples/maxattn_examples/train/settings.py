"""The settings of training: for every run, for flow matching, and for forcing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Lt

from maxattn.config import Section
from maxattn.errors import ConfigError
from maxattn_examples.common.settings import Count, NotNegative, Positive, Share, Whole

MOST = 1000  # the time of noise alone
How = Literal["none", "diffusion", "teacher"]
Target = Literal[
    "to_q", "to_k", "to_v", "to_out", "add_k_proj", "add_v_proj", "add_q_proj", "to_add_out"
]


class DataSettings(Section):
    """The folder of the examples."""

    folder: str | None = None
    """A folder that examples/make_latents.py made: latents, texts and what else the model takes."""


class TrainingSettings(Section):
    """Training of a model, and its output folder."""

    steps: Count = 1000
    """Updates of the parameters."""
    batch_size: Count = 1
    """Examples an update, over all devices."""
    gradient_accumulation_steps: Count = 1
    """Parts that a batch is learned from in turn, so that only a part is in memory."""
    learning_rate: Positive = 1e-5
    """Its peak, reached after the warm-up."""
    learning_rate_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: as it is, or along a cosine down to a hundredth."""
    warmup_steps: Whole = 100
    """Steps from zero to the peak."""
    weight_decay: NotNegative = 0.01
    """Pull of every weight towards zero."""
    adam_b1: Share = 0.9
    """Memory of the gradients' mean."""
    adam_b2: Share = 0.999
    """Memory of their squares' mean."""
    moment_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the gradients' mean. Their squares' is float32: bfloat16 would lose its small moves."""
    max_grad_norm: NotNegative = 1.0
    """Gradients together longer than this are shortened to it; 0 never."""
    ema_decay: Share = 0.0
    """Memory of averaged parameters, which then draw and are exported; 0 keeps none."""
    condition_dropout: Share = 0.1
    """Share of examples whose text is replaced by the empty one, which guidance needs."""
    lora_rank: Whole = 0
    """Train low-rank changes of attention's projections alone; 0 trains every parameter."""
    lora_alpha: Positive | None = None
    """A change counts lora_alpha / lora_rank; null is the rank."""
    lora_targets: tuple[Target, ...] = ("to_q", "to_k", "to_v", "to_out")
    """The projections that get one."""
    checkpoint_every: Count = 500
    """Steps between checkpoints."""
    keep_checkpoints: Count = 2
    """How many of the last ones stay."""
    log_every: Count = 10
    """Steps between TensorBoard's points, and between lines where there is no terminal."""
    picture_every: Whole = 0
    """Steps between pictures of samples; 0 draws none."""
    tensorboard: bool = True
    """Write scalars to output_dir/tensorboard."""
    export: bool = True
    """Write the result to output_dir as diffusers reads it: a folder, or the LoRA's file."""
    export_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the matrices that are written; null: as they are trained."""
    seed: Whole = 0
    """Of new parameters, order of examples, times and noise."""
    resume: bool = True
    """Go on from the last checkpoint; false starts again: its first one replaces those there."""
    compiler_options: tuple[str, ...] = ()
    """Of XLA, for the step: NAME=VALUE, the names as in XLA_FLAGS."""
    output_dir: str = "out/train"
    """Where all that is written goes."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse parts that do not divide a batch, and LoRA settings without effect."""
        parts, batch = values["gradient_accumulation_steps"], values["batch_size"]
        if batch % parts:
            divisors = ", ".join(str(n) for n in range(1, batch + 1) if batch % n == 0)
            rule = f"it must divide the batch size, {batch}"
            yield ConfigError("gradient_accumulation_steps", parts, rule, f"use one of {divisors}")
        if values["lora_rank"] and not values["lora_targets"]:
            rule = "LoRA changes at least one projection"
            yield ConfigError("lora_targets", "[]", rule, "write [to_q, to_v]")
        if (alpha := values["lora_alpha"]) is not None and not values["lora_rank"]:
            rule = "it scales LoRA, and lora_rank is 0"
            remedy = "set training.lora_rank, or remove it"
            yield ConfigError("lora_alpha", alpha, rule, remedy)


class FlowTraining(TrainingSettings):
    """Training by flow matching, with the distribution of its times."""

    timestep_sampling: Literal["logit_normal", "uniform"] = "logit_normal"
    """How times between 0 (clean) and 1 (noise) are drawn, before the shift."""
    logit_mean: float = 0.0
    """Of logit_normal: above 0, more of the noisy times."""
    logit_std: Positive = 1.0
    """Of logit_normal: its spread."""
    timestep_shift: Positive = 3.0
    """Moves times t to shift t / (1 + (shift - 1) t): above 1, more of the noisy ones."""


class ForcedTraining(FlowTraining):
    """Training to sample videos in the blocks of the section rollout."""

    forcing: How = "none"
    """Times of blocks drawn apart: blocks see earlier ones noisy (diffusion) or clean (teacher)."""
    context_noise: Annotated[float, Ge(0), Lt(MOST)] = 0.0
    """With teacher: the largest time, of 1000, of the clean frames; the model reads each time."""
    context_dropout: Share = 0.0
    """With teacher: share of clips whose clean frames are noise alone, so that texts count."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse keys of clean clips without teacher forcing, and samples during forcing."""
        yield from super().contradictions(values)
        yield from context_errors(values)
        if values["forcing"] != "none" and (every := values["picture_every"]):
            rule = "pictures are of whole videos, which forcing does not train"
            remedy = "set it to 0, and stream the exported model: examples/stream.py"
            yield ConfigError("picture_every", every, rule, remedy)


def context_errors(values: Mapping[str, Any]) -> Iterable[ConfigError]:
    """Yield an error for each key of clean clips that the kind of forcing does not use."""
    for key in ("context_noise", "context_dropout"):
        if values["forcing"] != "teacher" and values[key]:
            rule = f"it applies to clean clips, which forcing: {values['forcing']} lacks"
            yield ConfigError(key, values[key], rule, "set it to 0, or forcing: teacher")
