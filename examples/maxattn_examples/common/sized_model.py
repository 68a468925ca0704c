"""Settings of a model whose sizes can be changed one by one, or are those of a folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

from maxattn.config import ConfigErrors, Section
from maxattn.errors import ConfigError

from .pipeline_folder import absent, part_error, part_of
from .settings import Dtype


class SizedModel(Section):
    """A model, by its folder or its sizes, and its dtypes.

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
        """The sizes that are changed here."""
        return {key: value for key in self.own() if (value := getattr(self, key)) is not None}

    @property
    def asked(self) -> Any:
        """The sizes that are asked for here; None where only the folder says them."""
        if self.folder is not None and not self.changed_sizes:
            return None
        return replace(self.usual, **self.changed_sizes)

    @property
    def repository(self) -> str | None:
        """Where the folder of the model can be had; None where the family's own is meant."""
        return None

    def found(self, kind: Any, part: str) -> Any:
        """Return the sizes of the model: its folder's, those asked for, or both when they agree.

        Args:
            kind: the dataclass, whose `of_folder` reads a folder.
            part: of a pipeline's folder.

        Raises:
            ConfigError: there is no such folder, or it is a pipeline's without this part.
            WeightsError: the folder says no sizes, or those of another model.
            ConfigErrors: the folder's sizes are not those that are asked for.
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
