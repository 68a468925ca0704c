"""Settings of a model whose sizes have names: those named, those of a folder, or both alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

from maxattn.errors import ConfigError

from .sized_model import SizedModel


class NamedModel(SizedModel):
    """A transformer, by its folder or its sizes, and its dtypes.

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
        """The name of the sizes; None where only the folder says them."""
        return getattr(self, "sizes", None)

    @property
    def asked(self) -> Any:
        """The sizes that are named here; None where only the folder says them."""
        return None if self.name is None else replace(self.known[self.name], **self.changed_sizes)

    @property
    def repository(self) -> str | None:
        """Where the named model can be had."""
        return None if self.name is None else self.repositories[self.name]

    def differences(self, found: Any) -> Iterator[ConfigError]:
        """Yield a name that is another model's, and each changed size that the folder has not."""
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
        """Refuse a model without sizes, changes of sizes that are not named, and misfits."""
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
