"""The rule and the remedy of a wrong value, by the kind of error that pydantic reports."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydantic.fields import FieldInfo

from maxattn.config.errors import close, plain
from maxattn.config.numbers import LONGEST

EMPTY = "remove the line, or give it a value"
NAMED = 9  # choices that a rule lists before it says how many more there are


class Limit(NamedTuple):
    """Say what pydantic calls a limit, and the rule and remedy of a number beyond it."""

    key: str
    rule: str
    remedy: str


LIMITS = {
    "greater_than": Limit("gt", "a number above {}", "write more than {}"),
    "greater_than_equal": Limit("ge", "a number of at least {}", "write {} or more"),
    "less_than": Limit("lt", "a number below {}", "write less than {}"),
    "less_than_equal": Limit("le", "a number of at most {}", "write {} or less"),
}
FLOATS = ("float_type", "finite_number")


def is_type_error(kind: str) -> bool:
    """Say whether an error is about the type of a value, so that text is shown in quotes."""
    return kind in _TYPE_RULES


def rule_and_remedy(
    kind: str, value: Any, context: Mapping[str, Any], message: str
) -> tuple[str, str]:
    """Return the rule that a value breaks, and what to write in its place.

    Args:
        kind: pydantic's name of the error.
        value: what was written.
        context: pydantic's details: the limit, the choices.
        message: pydantic's own sentence, used for kinds that are not known here.
    """
    if kind == "maxattn":
        return context["rule"], context["remedy"]
    if kind == "literal_error":
        return _one_of(value, context["expected"])
    if kind in _TYPE_RULES:
        rule, remedy = _TYPE_RULES[kind]
        return rule, EMPTY if value is None else remedy(value)
    if kind in LIMITS:
        limit = LIMITS[kind]
        bound = context[limit.key]
        return limit.rule.format(bound), limit.remedy.format(bound)
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:], "give it a value that keeps this rule"


def with_limits(rule: str, value: Any, field: FieldInfo | None) -> str:
    """Add to `a number` the limits of its field, and that it is finite where it is not."""
    metadata = getattr(field, "metadata", ())
    found = [_limit_text(m, limit) for m in metadata for limit in LIMITS.values()]
    limits = " and ".join(text for text in found if text)
    return f"{'a finite number' if _infinite(value) else rule} {limits}".rstrip()


def _limit_text(metadata: Any, limit: Limit) -> str:
    if not hasattr(metadata, limit.key):
        return ""
    words = limit.rule.removeprefix("a number ")
    return words.format(float(getattr(metadata, limit.key)))


def _infinite(value: Any) -> bool:
    try:
        return not math.isfinite(float(value))
    except OverflowError:  # an int beyond the range of floats
        return True
    except (TypeError, ValueError):
        return False


def _one_of(value: Any, expected: str) -> tuple[str, str]:
    known = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    longer = known[NAMED:]
    more = f", or {len(longer)} longer spellings such as {longer[0]}" if longer else ""
    rule = f"one of {', '.join(known[:NAMED])}{more}"
    if isinstance(value, bool):
        return rule, "YAML reads on, off, yes and no as true and false: write one of the names"
    return rule, EMPTY if value is None else close(plain(value), known) or "write one of them"


# ---- remedies by type ----------------------------------------------------------------------------


def _as_integer(value: Any) -> str:
    if isinstance(value, bool):
        return "write a number, not true or false"
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    digits = value.strip().replace("_", "") if isinstance(value, str) else ""
    plainly = re.fullmatch(rf"-?[0-9]{{1,{LONGEST}}}", digits)
    return f"write {int(digits)}, without quotes" if plainly else "write a number such as 512"


def _as_boolean(value: Any) -> str:
    word = plain(value).strip().casefold()
    if word in ("1", "yes", "true", "on", "y"):
        return "write true, without quotes"
    if word in ("0", "no", "false", "off", "n"):
        return "write false, without quotes"
    return "write true or false"


def _as_float(value: Any) -> str:
    try:
        written = isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        written = False
    return f"write {float(value)}, without quotes" if written else "write a number such as 0.5"


def _as_list(value: Any) -> str:
    return f"write a list: [{value}]" if isinstance(value, str) else "write a list: [first, second]"


def _as_text(value: Any) -> str:
    return f'put it in quotes: "{value}"'


def _as_mapping(value: Any) -> str:
    return "write its keys indented below it, or as {key: value}"


_TYPE_RULES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "int_type": ("a whole number", _as_integer),
    "bool_type": ("true or false", _as_boolean),
    "float_type": ("a number", _as_float),
    "finite_number": ("a finite number", _as_float),
    "string_type": ("text", _as_text),
    "tuple_type": ("a list", _as_list),
    "model_type": ("a mapping of keys to values", _as_mapping),
    "dict_type": ("a mapping of keys to values", _as_mapping),
}
