"""Sections that families share (a model by folder or sizes; a rollout), and types of settings."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le, Lt

import maxattn as ma
from maxattn.config import ConfigErrors, Imported, Section
from maxattn.errors import ConfigError
from maxattn.tools.self_forcing import load_rollout

from .pipeline_folder import absent, part_error, part_of

Count = Annotated[int, Ge(1)]
Whole = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Lt(1)]
Dtype = Literal["float32", "bfloat16", "float16"]


class SizedModel(Section):
    """A model, given by its folder or its sizes, and its dtypes.

    A subclass adds fields with the names of sizes, each None unless it changes that size.
    """

    usual: ClassVar[Any]
    """A dataclass of sizes: those of a new model that changes none."""

    folder: str | None = None
    """Sizes and weights in diffusers' format, a pipeline's or its model's; null: random."""
    dtype: Dtype = "bfloat16"
    """Of the computation; norms, modulation and softmax are float32 whatever it is."""
    param_dtype: Dtype = "float32"
    """Of the parameters."""
    scan_layers: bool | None = None
    """true: blocks are stacked and compile once; false: each is compiled, and a GPU copies no slice
    of its weights; null: false where a GPU draws or streams, else true."""
    shapes: tuple[str, ...] = ()
    """What `maxattn check`, `compile` and `tune` look at; the model itself takes any shape."""

    @classmethod
    def own(cls) -> tuple[str, ...]:
        """Name the settings that change a size."""
        names = {field.name for field in fields(cls.usual)}
        return tuple(key for key in cls.model_fields if key in names)

    @property
    def changed_sizes(self) -> dict[str, Any]:
        """The sizes that the settings change."""
        return {key: value for key in self.own() if (value := getattr(self, key)) is not None}

    @property
    def asked(self) -> Any:
        """The sizes that the settings give; None if only the folder gives them."""
        if self.folder is not None and not self.changed_sizes:
            return None
        return replace(self.usual, **self.changed_sizes)

    @property
    def repository(self) -> str | None:
        """The Hugging Face repository of the model; None for the family's usual one."""
        return None

    def found(self, kind: Any, part: str) -> Any:
        """Return the sizes from the folder, from the settings, or from both if they agree.

        Raises:
            ConfigError: the folder does not exist, or is a pipeline's without this part.
            WeightsError: the folder has no sizes, or those of another kind of model.
            ConfigErrors: the folder's sizes differ from the settings'.
        """
        if self.folder is None:
            return self.asked
        if self.repository is not None:
            for problem in absent(self.folder, repository=self.repository):
                raise problem
        if (problem := part_error(self.folder, part)) is not None:
            raise problem
        found = kind.of_folder(part_of(self.folder, part))
        if problems := list(self.differences(found)):
            raise ConfigErrors(problems)
        return found

    def differences(self, found: Any) -> Iterator[ConfigError]:
        """Yield an error for each changed size that the folder's model does not have."""
        for key, value in self.changed_sizes.items():
            if (held := getattr(found, key)) != value:
                rule = f"the model in {self.folder} has {held}"
                yield ConfigError(
                    f"model.{key}", value, rule, "remove it: the folder's config.json sets it"
                )

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse sizes that do not fit each other."""
        changed = {key: values[key] for key in cls.own() if values[key] is not None}
        return replace(cls.usual, **changed).misfits()


class NamedModel(SizedModel):
    """A transformer, given by its folder or its sizes, and its dtypes.

    A subclass adds `sizes`, a name of `known` or None, and fields with the names of sizes, each
    None unless it changes that size.
    """

    known: ClassVar[Mapping[str, Any]]
    """Dataclasses of sizes by name."""
    repositories: ClassVar[Mapping[str, str]]
    """Where each of them can be had."""

    @classmethod
    def own(cls) -> tuple[str, ...]:
        """Name the settings that change a size."""
        names = {field.name for sizes in cls.known.values() for field in fields(sizes)}
        return tuple(key for key in cls.model_fields if key in names)

    @property
    def name(self) -> str | None:
        """The name of the sizes; None if only the folder gives them."""
        return getattr(self, "sizes", None)

    @property
    def asked(self) -> Any:
        """The named sizes with their changes; None if only the folder gives them."""
        return None if self.name is None else replace(self.known[self.name], **self.changed_sizes)

    @property
    def repository(self) -> str | None:
        """The Hugging Face repository of the named model."""
        return None if self.name is None else self.repositories[self.name]

    def differences(self, found: Any) -> Iterator[ConfigError]:
        """Yield an error if the folder's model has another name, and for each changed size."""
        yield from super().differences(found)
        named = None if self.name is None else self.known[self.name]
        others = [key for key in vars(named) if key not in self.changed_sizes] if named else []
        unlike = [key for key in others if getattr(found, key) != getattr(named, key)]
        if unlike:
            held = ", ".join(f"{key} {getattr(found, key)}" for key in unlike)
            wanted = ", ".join(f"{getattr(named, key)}" for key in unlike)
            rule = f"the model in {self.folder} has {held}, and {self.name} has {wanted}"
            fits = [name for name, sizes in self.known.items() if sizes == found]
            other = f"write model.sizes={fits[0]}, or " if fits else "write "
            remedy = f"{other}model.sizes=null to take the folder's"
            yield ConfigError("model.sizes", self.name, rule, remedy)

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse a model without sizes, changes without named sizes, and sizes that do not fit."""
        changed = {key: values[key] for key in cls.own() if values[key] is not None}
        if values["sizes"] is not None:
            yield from replace(cls.known[values["sizes"]], **changed).misfits()
            return
        if values["folder"] is None:
            rule = "the model's sizes come from a name or a folder"
            remedy = f"write one of {', '.join(cls.known)}, or give model.folder"
            yield ConfigError("sizes", "null", rule, remedy)
        for key, value in changed.items():
            rule = "it changes a named size, and sizes is null"
            remedy = "name the sizes, or remove it"
            yield ConfigError(key, value, rule, remedy)


MOST = 1000  # the time of noise alone; 0 is the time of a clean frame
Step = Annotated[float, Gt(0), Le(MOST)]


class RolloutSettings(Section):
    """How a video is sampled block by block."""

    frames_per_block: Count = 3
    """Latent frames that are made together, as in the model's training."""
    window: Count | None = None
    """Blocks that a block sees, its own included; null is all."""
    sink: Whole = 0
    """First frames that stay visible, counted inside the window."""
    first_frame_alone: bool = False
    """Whether frame 0 is a block of its own, as in models of image to video."""
    denoising_steps: tuple[Step, ...] = (1000, 750, 500, 250)
    """Times of the steps of a block, from 1000 (noise) down; 0 (clean) is none of them."""
    warp_steps: bool = True
    """Move the times by timestep_shift; false: the model gets them as they are written."""
    timestep_shift: Positive = 5.0
    """Moves times t to 1000 shift u / (1 + (shift - 1) u) with u = t / 1000."""
    context_noise: Annotated[float, Ge(0), Lt(MOST)] = 0.0
    """The time, of 1000, of the frames that later blocks see; 0 is clean. It is never moved."""
    positions: Literal["absolute", "slots", "slots_with_sink"] = "absolute"
    """Of kept keys: that of their frame, or of their slot in a model that was trained so."""
    clean_pass: bool = True
    """Whether a last pass keeps the clean block; false keeps the last step's noisy keys."""
    cache_dtype: Dtype | None = None
    """Of the cache; null is model.dtype."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse a sink that fills its window, rising steps, and noise without a clean pass."""
        yield from _of_window(values["frames_per_block"], values["window"], values["sink"])
        yield from _of_steps(values["denoising_steps"])
        if values["context_noise"] and not values["clean_pass"]:
            rule = "it is the time of the clean pass, and clean_pass is false"
            remedy = "set it to 0, or clean_pass: true"
            yield ConfigError("context_noise", values["context_noise"], rule, remedy)
        if values["positions"] == "slots" and values["sink"]:
            rule = "with a sink, positions by slots differ from positions by frames"
            remedy = "write slots_with_sink for a model that was trained so, else absolute"
            yield ConfigError("positions", "slots", rule, remedy)

    @classmethod
    def from_self_forcing(cls, path: str | os.PathLike[str]) -> Imported[Self]:
        """Read a YAML file of Self-Forcing, LongLive or a project with the same keys.

        Returns:
            (config, left_out, notes), as `AttentionConfig.from_maxdiffusion` does.

        Raises:
            ConfigErrors: all errors in the keys that are read, with file and line.
        """
        found = load_rollout(path)
        return Imported(cls(**found.rollout), found.left_out, found.notes)

    @property
    def times(self) -> tuple[float, ...]:
        """The model's times in the steps of a block, 1000 (noise) to 0 (clean)."""
        shift = self.timestep_shift if self.warp_steps else 1.0
        parts = (step / MOST for step in self.denoising_steps)
        return tuple(MOST * shift * u / (1 + (shift - 1) * u) for u in parts)

    def stream(self, tokens_per_frame: int) -> ma.Stream:
        """Make the `Stream` that gives masks and cache their layout.

        Args:
            tokens_per_frame: tokens of a latent frame: rows times columns of patches.
        """
        sizes = self.frames_per_block, self.window, self.sink, self.first_frame_alone
        return ma.Stream(tokens_per_frame, *sizes)


def _of_window(size: int, window: int | None, sink: int) -> Iterator[ConfigError]:
    if not sink:
        return
    if window is None:
        rule = "a sink is part of a window, and without a window every frame is kept"
        yield ConfigError("sink", sink, rule, "set window, or remove sink")
        return
    most = (window - 1) * size
    if sink > most:
        rule = f"the sink and one block must fit into {window} blocks of {size} frames"
        yield ConfigError("sink", sink, rule, f"write at most {most}, or a larger window")


def _of_steps(steps: tuple[float, ...]) -> Iterator[ConfigError]:
    if not steps:
        rule = "a block needs at least one step"
        yield ConfigError("denoising_steps", "[]", rule, "write for example [1000, 750, 500, 250]")
    if any(later >= step for step, later in pairwise(steps)):
        rule = "times must fall, since steps go from noise to a clean frame"
        yield ConfigError("denoising_steps", list(steps), rule, "write them from 1000 down")
