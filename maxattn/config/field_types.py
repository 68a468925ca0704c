"""The types of the settings: what a value may be, and what to say when it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import AfterValidator, BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError, PydanticKnownError, core_schema

from maxattn.config import rules
from maxattn.config.numbers import LARGEST, MOST_DEVICES, whole
from maxattn.config.rules import AXES, Axis


def _broken(rule: str, remedy: str) -> PydanticCustomError:
    return PydanticCustomError("maxattn", "{rule}", {"rule": rule, "remedy": remedy})


def _positive_or_rest(value: int) -> int:
    if value == -1 or whole(value, most=MOST_DEVICES):
        return value
    if value > 0:
        raise _broken(f"at most {MOST_DEVICES} devices", "write fewer, or -1")
    raise _broken("a positive whole number, or -1", "write 1 or more, or -1")


def _some_and_each_once(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    if not axes:
        raise _broken("a mesh has at least one axis", f"write [{', '.join(AXES)}], or some of them")
    twice = [axis for i, axis in enumerate(axes) if axis in axes[:i]]
    if twice:
        raise _broken(f"each axis once; '{twice[0]}' is there twice", "remove one of them")
    return axes


def _not_a_strategy(value: Any) -> Any:
    if isinstance(value, str) and rules.kernel_and_strategy(value)[1] != "auto":
        rule = f"one of {', '.join(rules.kernels())}; {value} is a strategy of self-attention"
        raise _broken(rule, f"write `attention: {value}`")
    return value


class _OneOf:
    """Take one of the names of a table, as it stands when a value is checked."""

    def __init__(self, names: Callable[[], tuple[str, ...]]) -> None:
        self.names = names

    def check(self, value: Any) -> str:
        names = self.names()
        if isinstance(value, str) and value in names:
            return value
        listed = [repr(name) for name in names]
        expected = f"{', '.join(listed[:-1])} or {listed[-1]}"
        raise PydanticKnownError("literal_error", {"expected": expected})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return core_schema.no_info_plain_validator_function(self.check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self.names()), "type": "string"}


_POSITIVE_OR_REST = {
    "type": "integer",
    "anyOf": [{"const": -1}, {"minimum": 1, "maximum": MOST_DEVICES}],
}
_AXES = {"type": "array", "items": {"enum": list(AXES)}, "uniqueItems": True, "minItems": 1}

Positive = Annotated[int, Ge(1), Le(LARGEST)]
NotNegative = Annotated[int, Ge(0), Le(LARGEST)]
PositiveOrRest = Annotated[
    int, AfterValidator(_positive_or_rest), WithJsonSchema(_POSITIVE_OR_REST)
]
Attention = Annotated[str, _OneOf(rules.attentions)]
Strategy = Annotated[str, _OneOf(rules.strategies)]
KernelName = Annotated[str, _OneOf(rules.kernels), BeforeValidator(_not_a_strategy)]
Axes = Annotated[tuple[Axis, ...], AfterValidator(_some_and_each_once), WithJsonSchema(_AXES)]
