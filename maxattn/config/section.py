"""The base of every part of a config: frozen, strict, hashed once, with errors in our own words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from maxattn.config.errors import ConfigErrors, Locate, located
from maxattn.config.fields import defaults, section_type
from maxattn.config.numbers import DEEPEST
from maxattn.config.translate import translated
from maxattn.errors import ConfigError


class Section(BaseModel):
    """Settings of one part: frozen, unknown keys refused, no conversion of types, hashed once.

    Subclass it for the part of a YAML file that belongs to a program (`model:`, `training:`, ...).
    Fields that hold several values are tuples, so that a section can be hashed.

    Raises:
        ConfigErrors: for every wrong key and value at once, when it is built.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigErrors(problems_of(type(self), values, error)) from None

    # A model inside a model is then validated in place, so that the outer one collects the errors
    # of both.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    @classmethod
    def contradictions(cls, values: Mapping[str, Any]) -> Iterable[ConfigError]:
        """Yield one error for each pair of keys that cannot both be meant; none here.

        Args:
            values: every field by name, each valid by itself.
        """
        del values
        return ()

    @classmethod
    def settled(cls, values: Mapping[str, Any], given: Set[str]) -> Mapping[str, Any]:
        """Return the defaults that depend on other keys, by name; none here.

        Args:
            values: every field by name, each valid by itself.
            given: the names that the user set.
        """
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

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some keys changed, validated as a whole.

        Raises:
            ConfigErrors: when a change is wrong by itself or beside the other settings.
        """
        kept = {key: getattr(self, key) for key in self.model_fields_set}
        return type(self)(**(kept | changes))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy; changes are validated, as by `replace`."""
        return self.replace(**update) if update else super().model_copy(deep=deep)

    def resolved(self) -> dict[str, Any]:
        """Return every key with its value as plain data, ready for YAML or JSON."""
        return self.model_dump(mode="json")

    @cached_property
    def changed(self) -> frozenset[str]:
        """The keys whose value differs from the default, whoever set them."""
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
        # The hash of a string differs from process to process, so a cached one must not travel.
        state, fields = super().__getstate__(), type(self).model_fields
        kept = {key: value for key, value in state["__dict__"].items() if key in fields}
        return state | {"__dict__": kept}


def problems_of(
    model: type[Section],
    data: Mapping[str, Any],
    error: ValidationError,
    locate: Locate = lambda path: "",
) -> list[ConfigError]:
    """Return what pydantic found, and the contradictions between the keys that are right.

    Args:
        model: what was validated.
        data: what it was validated from.
        error: what pydantic found.
        locate: returns `file:line` of a path; empty when it was not in a file.
    """
    problems, fields = translated(model, error, locate), model.model_fields
    wrong = {detail["loc"][0] for detail in error.errors() if detail["loc"]}
    if not wrong:
        return problems
    # The rules between keys are checked as if every wrong key had its default.
    given = {k: _built(fields[k], v) for k, v in data.items() if k in fields and k not in wrong}
    values = defaults(model) | given
    values |= model.settled(values, given.keys())
    try:
        for found in model.contradictions(values):
            problems.append(located(found, locate))
    # A rule about a wrong key that has no default is checked once the key is mended.
    except KeyError:
        pass
    return problems


def _built(field: FieldInfo, value: Any) -> Any:
    section = section_type(field)
    if section is not None and isinstance(value, Mapping):
        return section.model_validate(value)
    return tuple(value) if isinstance(value, list) else value


def _freeze(value: Any, levels: int = DEEPEST) -> Any:
    """Make lists tuples; what is deeper than any field is left for its field to refuse."""
    if not isinstance(value, list) or not levels:
        return value
    return tuple(_freeze(item, levels - 1) for item in value)
