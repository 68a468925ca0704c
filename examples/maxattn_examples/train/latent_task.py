"""Shared by the tasks of real models: a folder of latents, and one of weights to begin with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
from flax import nnx

from maxattn import weights
from maxattn_examples.common.pipeline_folder import part_of

from .latents import LatentFolder
from .task import KEPT, Fixed


@dataclass(frozen=True)
class LatentTask:
    """Begin a `Task` whose examples are latents and whose weights have diffusers' format.

    Args:
        settings: of everything.
        sizes: of the model; `of(settings)` of a subclass finds them.
    """

    settings: Any
    sizes: Any

    fixed: ClassVar[Fixed] = KEPT

    @property
    def part(self) -> str:
        """The folder of a pipeline that holds the model."""
        raise NotImplementedError(f"{type(self).__name__} says its part")

    @property
    def training(self) -> Any:
        """How it is trained."""
        return self.settings.training

    @property
    def folder(self) -> Path | None:
        """Where the weights are that training begins from."""
        folder = self.settings.model.folder
        return None if folder is None else part_of(folder, self.part)

    @property
    def frames_per_block(self) -> int | None:
        """Frames that the model learns to make together: none, except by forcing."""
        return None

    @property
    def examples_at_once(self) -> int:
        """The examples of one call of the model: a batch, or a part of it."""
        return self.training.batch_size // self.training.gradient_accumulation_steps

    def source(self) -> LatentFolder:
        """Open the folder of latents."""
        return LatentFolder(self.settings.data.folder)

    def load(self, model: nnx.Module, mesh: jax.sharding.Mesh | None) -> bool:
        """Read the weights of `model.folder`, where there is one."""
        if self.folder is None:
            return False
        weights.load_diffusers(model, self.folder, mesh=mesh)
        return True
