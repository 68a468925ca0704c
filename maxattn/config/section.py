"""What every part of a config shares: frozen, strict, hashed once, and errors in our own words.

It knows no key of attention; `config.py` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from maxattn.config.errors import ConfigErrors, defaults, from_pydantic
from maxattn.errors import ConfigError


class Section(BaseModel):
    """Hold settings: frozen, unknown keys refused, no conversion between types, hash computed once.

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
            raise ConfigErrors(from_pydantic(type(self), values, error)) from None

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

    @model_validator(mode="before")
    @classmethod
    def _lists_as_tuples(cls, data: Any) -> Any:
        return (
            {key: _freeze(value) for key, value in data.items()} if isinstance(data, dict) else data
        )

    @classmethod
    def settled(cls, values: Mapping[str, Any], given: Set[str]) -> Mapping[str, Any]:
        """Return the defaults that depend on other keys, by name; none here.

        Args:
            values: every field by name, each valid by itself.
            given: the names that the user set.
        """
        del values, given
        return {}

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for key, value in self.settled(self.__dict__, self.model_fields_set).items():
            object.__setattr__(self, key, value)
        problems = tuple(self.contradictions(self.__dict__))
        if problems:
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
        """Return every key with its value as plain dicts, lists, strings and numbers, ready for
        YAML or JSON.
        """
        return self.model_dump(mode="json")

    @cached_property
    def changed(self) -> frozenset[str]:
        """The keys whose value differs from the default. It depends on values alone, not on who set
        them.
        """
        default = defaults(type(self))
        return frozenset(
            k for k in type(self).model_fields if k not in default or getattr(self, k) != default[k]
        )

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
        state = super().__getstate__()
        fields = type(self).model_fields
        return state | {
            "__dict__": {key: value for key, value in state["__dict__"].items() if key in fields}
        }


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
