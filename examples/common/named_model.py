"""Settings of a model whose sizes have names: those named, those of a folder, or both alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

from maxattn.config import ConfigErrors, Section
from maxattn.errors import ConfigError

from .pipeline_folder import part_of
from .settings import Dtype


class NamedModel(Section):
    """Hold which transformer it is, and in which dtypes.

    A subclass adds `sizes`, a name of `known` or None, and fields with the names of sizes, each
    None unless it changes that size.
    """

    known: ClassVar[Mapping[str, Any]]
    """Dataclasses of sizes by name."""

    folder: str | None = None
    """Sizes and weights in diffusers' format, a pipeline's or its transformer's; null: random."""
    dtype: Dtype = "bfloat16"
    """Of the computation; norms, modulation and softmax are float32 whatever it is."""
    param_dtype: Dtype = "float32"
    """Of the parameters."""
    shapes: tuple[str, ...] = ()
    """What `maxattn check`, `compile` and `tune` look at; the model itself takes any shape."""

    @classmethod
    def own(cls) -> tuple[str, ...]:
        """Name the settings that change a size."""
        names = {field.name for sizes in cls.known.values() for field in fields(sizes)}
        return tuple(key for key in cls.model_fields if key in names)

    @property
    def changed_sizes(self) -> dict[str, Any]:
        """The sizes that are not the named model's."""
        return {key: value for key in self.own() if (value := getattr(self, key)) is not None}

    @property
    def asked(self) -> Any:
        """The sizes that are named here; None where only the folder says them."""
        name = getattr(self, "sizes", None)
        return None if name is None else replace(self.known[name], **self.changed_sizes)

    def found(self, kind: Any, part: str) -> Any:
        """Return the sizes of the model: its folder's, the named ones, or both when they agree.

        Args:
            kind: the dataclass, whose `of_folder` reads a folder.
            part: of a pipeline's folder.

        Raises:
            ConfigError: there is no such folder.
            WeightsError: the folder says no sizes, or those of another model.
            ConfigErrors: the folder's sizes are not those that are named.
        """
        if self.folder is None:
            return self.asked
        found = kind.of_folder(part_of(self.folder, part))
        if problems := list(_differences(self.asked or found, found, self.folder)):
            raise ConfigErrors(problems)
        return found

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Refuse a model without sizes, and changes of sizes that are not named."""
        if values["sizes"] is not None:
            return
        if values["folder"] is None:
            rule = "a name or a folder says how large the model is"
            remedy = f"write one of {', '.join(cls.known)}, or give model.folder"
            yield ConfigError("sizes", "null", rule, remedy)
        for key, value in ((key, values[key]) for key in cls.own() if values[key] is not None):
            rule = "it changes a named size, and sizes is null"
            remedy = "name the sizes, or remove it"
            yield ConfigError(key, value, rule, remedy)


def _differences(asked: Any, found: Any, folder: str) -> Iterator[ConfigError]:
    remedy = "name its sizes, or write model.sizes=null to take them"
    for key, value in vars(asked).items():
        if (held := getattr(found, key)) != value:
            rule = f"the model in {folder} has {held}"
            yield ConfigError(f"model.{key}", value, rule, remedy)
