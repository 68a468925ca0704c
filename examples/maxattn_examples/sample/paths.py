"""The files and folders of a run of sampling."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from maxattn_examples.common.pipeline_folder import FIRST, SECOND, lacking, part_of


@dataclass(frozen=True)
class Paths:
    """Paths of the files that are read and written.

    Args:
        model: a pipeline's folder in diffusers' format, or its model's alone.
        weights: a folder whose weights are used instead of the model's, such as a training run's;
            it may hold one of two transformers.
        embeddings: what the model is told; else prompts are encoded with torch.
        image: what an image-to-video model begins with, encoded with torch.
        noise: where to begin, instead of noise of the seed.
        lora: weights that are merged.
        lora_2: weights that are merged into a pipeline's second transformer.
        lora_names: a YAML file with names of their layers, and the model's.
        lora_scale: multiplies them; None is 1.
        lora_lenient: leave out what does not fit the model.
        latents: where latents are written.
        out: the folder where what they show is written, decoded with torch.
    """

    model: Path
    weights: Path | None = None
    embeddings: Path | None = None
    image: Path | None = None
    noise: Path | None = None
    lora: Path | None = None
    lora_2: Path | None = None
    lora_names: Path | None = None
    lora_scale: float | None = None
    lora_lenient: bool | None = None
    latents: Path | None = None
    out: Path | None = None

    def weights_of(self, part: str) -> Path:
        """Return the folder of the weights: a part of a pipeline's folder, or the folder."""
        instead = self.weights
        if instead is not None and lacking(instead, (FIRST, SECOND)) == [part]:
            instead = None  # it holds the other transformer
        return part_of(instead or self.model, part)

    def lora_of(self, part: str) -> Path | None:
        """Return the LoRA weights of a part."""
        return self.lora_2 if part == SECOND else self.lora
