"""The base class of all sections of a config: frozen, strict, hashed once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from contextlib import suppress
from functools import cached_property
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from maxattn.config.errors import (
    ConfigErrors,
    Locate,
    defaults,
    located,
    plain,
    refused,
    section_type,
    translated,
)
from maxattn.config.numbers import DEEPEST
from maxattn.errors import ConfigError, did_you_mean


class Section(BaseModel):
    """Base class of a config's sections, which are frozen and hashed once.

    Unknown keys are refused, and types are not converted. Subclass it for a section of a YAML file
    that belongs to a program (`model:`, `training:`, ...). A field of several values must be a
    tuple, so that the section can be hashed.

    Raises:
        ConfigErrors: with every wrong key and value at once.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigErrors(problems_of(type(self), values, error)) from None

    # The flag makes pydantic validate inner sections in place, so one error has all problems.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    former: ClassVar[Mapping[str, str]] = {}
    """Keys that earlier versions had, and the remedy that an error gives for each."""

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Yield an error for each pair of keys that contradict each other; by default none.

        `values` maps every field to its value, which is valid by itself.
        """
        del values
        return ()

    @classmethod
    def settled(cls, values: Mapping[str, Any], given: Set[str]) -> Mapping[str, Any]:
        """Return the values of unset keys that depend on `values`; `given` lists the set keys."""
        del values, given
        return {}

    @model_validator(mode="before")
    @classmethod
    def _lists_as_tuples(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: _freeze(value) for key, value in data.items()}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for key, value in self.settled(self.__dict__, self.model_fields_set).items():
            object.__setattr__(self, key, value)
        if problems := tuple(self.contradictions(self.__dict__)):
            raise ConfigErrors(problems)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        keys = type(self).model_fields
        if name not in keys:
            remedy = did_you_mean(name, keys) or "change a key with replace(key=value)"
            raise refused(name, plain(value), f"{type(self).__name__} has no key '{name}'", remedy)
        rule = f"{type(self).__name__} is frozen: a setting changes in a copy"
        remedy = f"write changed = settings.replace({name}={value!r}), and pass the copy on"
        raise refused(name, plain(value), rule, remedy)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some keys changed, validated as a whole.

        Raises:
            ConfigErrors: a changed value is invalid, or contradicts another setting.
        """
        kept = {key: getattr(self, key) for key in self.model_fields_set}
        return type(self)(**(kept | changes))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; `update` is validated as in `replace`."""
        return self.replace(**update) if update else super().model_copy(deep=deep)

    def resolved(self) -> dict[str, Any]:
        """Return every key and value as plain data for YAML or JSON."""
        return self.model_dump(mode="json")

    @cached_property
    def changed(self) -> frozenset[str]:
        """The keys whose values differ from the defaults."""
        default, unset = defaults(type(self)), object()
        keys = type(self).model_fields
        return frozenset(k for k in keys if default.get(k, unset) != getattr(self, k))

    @cached_property
    def _digest(self) -> int:
        return hash((type(self), *(getattr(self, key) for key in type(self).model_fields)))

    def __hash__(self) -> int:
        return self._digest

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(self) is not type(other):
            return NotImplemented
        return hash(self) == hash(other) and super().__eq__(other)

    def __getstate__(self) -> dict[Any, Any]:
        # Hashes of strings differ between processes, so a pickle must not contain a cached hash.
        state, fields = super().__getstate__(), type(self).model_fields
        kept = {key: value for key, value in state["__dict__"].items() if key in fields}
        return state | {"__dict__": kept}


def problems_of(
    model: type[Section],
    data: Mapping[str, Any],
    error: ValidationError,
    locate: Locate = lambda path: "",
) -> list[ConfigError]:
    """Return the problems that pydantic found, and the contradictions between the valid keys."""
    problems, fields = translated(model, error, locate), model.model_fields
    wrong = {detail["loc"][0] for detail in error.errors() if detail["loc"]}
    if not wrong:
        return problems
    # The rules between keys are checked with defaults in place of wrong values.
    given = {k: _built(fields[k], v) for k, v in data.items() if k in fields and k not in wrong}
    values = defaults(model) | given
    values |= model.settled(values, given.keys())
    with suppress(KeyError):  # a rule that reads a wrong key without a default
        problems.extend(located(found, locate) for found in model.contradictions(values))
    return problems


def _built(field: FieldInfo, value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_built(field, item) for item in value)
    section = section_type(field)
    if section is not None and isinstance(value, Mapping):
        return section.model_validate(value)
    return value


def _freeze(value: Any, levels: int = DEEPEST) -> Any:
    """Turn nested lists into tuples, at most `levels` deep; validation refuses deeper lists."""
    if not isinstance(value, list) or not levels:
        return value
    return tuple(_freeze(item, levels - 1) for item in value)
