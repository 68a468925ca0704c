"""Translates pydantic's `ValidationError` into errors with setting, value, rule and remedy."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from maxattn.config.errors import Locate, Path, close, dotted, located, plain, problem, show
from maxattn.config.fields import Model, field_at, inner_keys, owner, section_type
from maxattn.config.numbers import LONGEST
from maxattn.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MOST_PROBLEMS = 100  # that are listed: the words for one are searched for among all keys
EMPTY = "remove the line, or give it a value"
NAMED = 9  # choices that a rule lists before it counts the others
# pydantic's name of an error, the name of its bound, the rule and the remedy.
LIMITS = {
    "greater_than": ("gt", "a number above {}", "write more than {}"),
    "greater_than_equal": ("ge", "a number of at least {}", "write {} or more"),
    "less_than": ("lt", "a number below {}", "write less than {}"),
    "less_than_equal": ("le", "a number of at most {}", "write {} or less"),
}


def translated(model: Model, error: ValidationError, locate: Locate) -> list[ConfigError]:
    """Return every problem that pydantic found, in our form.

    Args:
        model: what was validated.
        error: what pydantic found.
        locate: returns `file:line` of a path; empty when it was not in a file.
    """
    details = error.errors()
    listed = [p for detail in details[:MOST_PROBLEMS] for p in _translate(model, detail, locate)]
    if (more := len(details) - MOST_PROBLEMS) > 0:
        rule = f"the first {MOST_PROBLEMS} problems are listed"
        listed.append(problem("config", f"{more} more problems", rule, "mend those first"))
    return listed


def _translate(model: Model, detail: ErrorDetails, locate: Locate) -> Iterator[ConfigError]:
    path, kind, value = detail["loc"], detail["type"], detail["input"]
    raised = detail.get("ctx", {}).get("error")
    where, shown = locate(path), plain(value)
    if isinstance(raised, ConfigError):
        yield from (located(p, locate, path) for p in getattr(raised, "problems", (raised,)))
        return
    if kind == "extra_forbidden":
        rule = f"{dotted(path[:-1]) or 'the config'} has no key '{path[-1]}'"
        remedy = _remedy_for_key(model, path)
    elif kind == "missing":
        shown, rule = "not set", "it has no default and must be set"
        remedy = _remedy_for_missing(model, path)
    else:
        shown = show(value) if kind in _TYPES else shown  # text in quotes, if a number is wanted
        rule, remedy = _rule_and_remedy(detail)
        if kind in ("float_type", "finite_number"):
            rule = _with_limits(rule, value, getattr(field_at(model, path), "metadata", ()))
        if where.startswith("override"):
            remedy = remedy.replace("remove the line", "remove the override")
    yield problem(dotted(path), shown, rule, remedy, where)


# ---- keys ----------------------------------------------------------------------------------------


def _remedy_for_missing(model: Model, path: Path) -> str:
    if isinstance(path[-1], int):
        return f"write {path[-1] + 1} values or more"
    section = section_type(field_at(model, path))
    if section is None:
        return f"add a line `{path[-1]}: value`"
    required = [name for name, inner in section.model_fields.items() if inner.is_required()]
    return f"add `{path[-1]}:` and below it {', '.join(required) or 'its keys'}"


def _remedy_for_key(model: Model, path: Path) -> str:
    """Name the key that may have been meant."""
    section, word = owner(model, path[:-1]), str(path[-1])
    if ":" in word:
        return f"put a space after the colon: '{word.replace(':', ': ', 1)}'"
    guess = close(word, section.model_fields)
    if guess or section is not model:
        return guess or f"remove it; the keys here are {', '.join(section.model_fields)}"
    inner = inner_keys(model)
    if same := close(word, inner).removeprefix("did you mean '").removesuffix("'?"):
        return f"did you mean '{inner[same]}'?"
    return "remove it; configs/attention.yml lists every key"


# ---- values --------------------------------------------------------------------------------------


def _rule_and_remedy(detail: ErrorDetails) -> tuple[str, str]:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "maxattn":
        return context["rule"], context["remedy"]
    if kind == "literal_error":
        return _one_of(value, context["expected"])
    if kind in _TYPES:
        rule, remedy = _TYPES[kind]
        return rule, EMPTY if value is None else remedy(value)
    if kind in LIMITS:
        key, rule, remedy = LIMITS[kind]
        return rule.format(context[key]), remedy.format(context[key])
    message = detail["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:], "give it a value that keeps this rule"


def _with_limits(rule: str, value: Any, metadata: Any) -> str:
    """Add to `a number` the limits of its field, and that it is finite if the value is not."""
    try:
        is_finite = math.isfinite(float(value))
    except OverflowError:  # an int beyond the range of floats
        is_finite = False
    except (TypeError, ValueError):
        is_finite = True
    found = [
        words.removeprefix("a number ").format(float(getattr(each, key)))
        for each in metadata
        for key, words, _ in LIMITS.values()
        if hasattr(each, key)
    ]
    return f"{rule if is_finite else 'a finite number'} {' and '.join(found)}".rstrip()


def _one_of(value: Any, expected: str) -> tuple[str, str]:
    known = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    longer = known[NAMED:]
    more = f", or {len(longer)} longer spellings such as {longer[0]}" if longer else ""
    rule = f"one of {', '.join(known[:NAMED])}{more}"
    if isinstance(value, bool):
        return rule, "YAML reads on, off, yes and no as true and false: write one of the names"
    return rule, EMPTY if value is None else close(plain(value), known) or "write one of them"


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


_MAPPING = "write its keys indented below it, or as {key: value}"
_TYPES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "int_type": ("a whole number", _as_integer),
    "bool_type": ("true or false", _as_boolean),
    "float_type": ("a number", _as_float),
    "finite_number": ("a finite number", _as_float),
    "string_type": ("text", lambda value: f'put it in quotes: "{value}"'),
    "tuple_type": ("a list", _as_list),
    "model_type": ("a mapping of keys to values", lambda value: _MAPPING),
    "dict_type": ("a mapping of keys to values", lambda value: _MAPPING),
}
"""By pydantic's name of a wrong type: the rule, and the remedy of a value."""
