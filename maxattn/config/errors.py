"""Turns what validation found into errors in our words: setting, value, rule, remedy, and where it
was written.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from maxattn.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from maxattn.config.section import Section

Path = tuple[str | int, ...]
Locate = Callable[[Path], str]


class ConfigErrors(ConfigError):
    """Report every problem of one config at once.

    Args:
        problems: at least one; the attributes of the error are those of the first.
        source: the file, for the headline over several problems.
    """

    def __init__(self, problems: Iterable[ConfigError], source: str = "") -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.setting, first.value, first.rule, first.remedy, first.where)
        if len(self.problems) > 1:
            headline = f"{source or 'config'}: {len(self.problems)} problems"
            self.args = ("\n".join((headline, *map(str, self.problems))),)


def from_pydantic(
    model: type[Section],
    data: Mapping[str, Any],
    error: ValidationError,
    locate: Locate = lambda path: "",
) -> list[ConfigError]:
    """Translate a `ValidationError`, and add the contradictions between the keys that are right by
    themselves.

    Args:
        model: what was validated.
        data: what it was validated from.
        error: what pydantic found.
        locate: the place where a path was written, as `file:line`; empty when it was not in a file.
    """
    problems = [
        problem for detail in error.errors() for problem in _translate(model, detail, locate)
    ]
    wrong = {detail["loc"][0] for detail in error.errors() if detail["loc"]}
    return problems + (
        [located(p, locate) for p in _contradictions(model, data, wrong)] if wrong else []
    )


def located(problem: ConfigError, locate: Locate, prefix: Path = ()) -> ConfigError:
    """Return a problem with its place and its full dotted key."""
    path: Path = (*prefix, *problem.setting.split("."))
    where = problem.where or locate(path)
    return ConfigError(dotted(path), problem.value, problem.rule, problem.remedy, where)


def dotted(path: Sequence[str | int]) -> str:
    """Write a path as the user would: `flash_block_sizes.block_q`, `mesh_axes[2]`."""
    text = "".join(
        f"[{part}]" if isinstance(part, int) else f".{part or '(no name)'}" for part in path
    )
    return text.removeprefix(".")


def close(word: str, known: Iterable[str]) -> str:
    """Name the closest known word as a question, ignoring case; nothing when none is close."""
    known = list(known)
    same = [name for name in known if name.casefold() == word.casefold()]
    return f"did you mean '{same[0]}'?" if same else did_you_mean(word, known)


def section_type(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model that a field holds, whether or not it may be null; None for a plain
    value.
    """
    kinds = (field.annotation, *get_args(field.annotation))
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None
    )


def unknown_key(model: type[BaseModel], path: Path, value: object, where: str) -> ConfigError:
    """Say that a model has no such key, and which one may have been meant.

    Args:
        model: the outermost model; `path` starts from it.
        path: the key's path.
        value: what it was set to.
        where: its place.
    """
    owner, word = _owner(model, path[:-1]), str(path[-1])
    rule = f"{dotted(path[:-1]) or 'the config'} has no key '{word}'"
    return ConfigError(dotted(path), plain(value), rule, _remedy_for_key(model, owner, word), where)


def plain(value: object) -> str:
    """Write a value as YAML would where text cannot be mistaken for anything else: without
    quotes.
    """
    return value if isinstance(value, str) and value else show(value)


def show(value: object) -> str:
    """Write a value as YAML would, shortened: text in quotes, so that "512" and 512 differ."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def defaults(model: type[BaseModel]) -> dict[str, Any]:
    """Return the default of every field that has one, by name."""
    fields = model.model_fields.items()
    return {
        k: f.get_default(call_default_factory=True, validated_data={})
        for k, f in fields
        if not f.is_required()
    }


def _contradictions(
    model: type[Section], data: Mapping[str, Any], wrong: set[Any]
) -> Iterator[ConfigError]:
    """Check the rules between keys as if every wrong key had its default."""
    given = {
        key: value for key, value in data.items() if key in model.model_fields and key not in wrong
    }
    values = defaults(model) | {
        key: _built(model.model_fields[key], value) for key, value in given.items()
    }
    values |= model.settled(values, given.keys())
    try:
        yield from model.contradictions(values)
    # a rule about a key that is wrong and has no default: it can be checked once the key is
    # mended
    except KeyError:
        return


def _built(field: FieldInfo, value: Any) -> Any:
    section = section_type(field)
    if section is not None and isinstance(value, Mapping):
        return section.model_validate(value)
    return tuple(value) if isinstance(value, list) else value


def _owner(model: type[BaseModel], path: Path) -> type[BaseModel]:
    for part in path:
        field = model.model_fields.get(str(part))
        model = (section_type(field) if field else None) or model
    return model


def _remedy_for_key(model: type[BaseModel], owner: type[BaseModel], word: str) -> str:
    if ":" in word:
        return f"put a space after the colon: '{word.replace(':', ': ', 1)}'"
    guess = close(word, owner.model_fields)
    if guess or owner is not model:
        return guess or f"remove it; the keys here are {', '.join(owner.model_fields)}"
    inner = _inner_keys(model)
    same = close(word, inner).removeprefix("did you mean '").removesuffix("'?")
    return (
        f"did you mean '{inner[same]}'?"
        if same
        else "remove it; configs/attention.yml lists every key"
    )


def _inner_keys(model: type[BaseModel]) -> dict[str, str]:
    """Map the keys of the sections to their dotted paths."""
    return {
        key: f"{name}.{key}"
        for name, field in model.model_fields.items()
        for key in getattr(section_type(field), "model_fields", ())
    }


def _translate(model: type[Section], detail: ErrorDetails, locate: Locate) -> Iterator[ConfigError]:
    path, kind, context = detail["loc"], detail["type"], detail.get("ctx", {})
    raised = context.get("error")
    if isinstance(raised, ConfigError):
        yield from (located(p, locate, path) for p in getattr(raised, "problems", (raised,)))
    elif kind == "extra_forbidden":
        yield unknown_key(model, path, detail["input"], locate(path))
    elif kind == "missing":
        rule, remedy = "it has no default and must be set", _remedy_for_missing(model, path)
        yield ConfigError(dotted(path), "not set", rule, remedy, locate(path))
    else:
        rule, remedy = _rule_and_remedy(kind, detail["input"], context, detail["msg"])
        if kind in _FLOATS:
            rule = _of_number(model, path, detail["input"], rule)
        if locate(path).startswith("override"):
            remedy = remedy.replace("remove the line", "remove the override")
        write = show if kind in _TYPE_RULES else plain
        yield ConfigError(dotted(path), write(detail["input"]), rule, remedy, locate(path))


def _remedy_for_missing(model: type[BaseModel], path: Path) -> str:
    field = _owner(model, path[:-1]).model_fields.get(str(path[-1]))
    section = section_type(field) if field else None
    if isinstance(path[-1], int):
        return f"write {path[-1] + 1} values or more"
    if section is None:
        return f"add a line `{path[-1]}: value`"
    required = [name for name, inner in section.model_fields.items() if inner.is_required()]
    return f"add `{path[-1]}:` and below it {', '.join(required) or 'its keys'}"


def _rule_and_remedy(
    kind: str, value: Any, context: Mapping[str, Any], message: str
) -> tuple[str, str]:
    if kind == "maxattn":
        return context["rule"], context["remedy"]
    if kind == "literal_error":
        return _one_of(value, context["expected"])
    if kind in _TYPE_RULES:
        rule, remedy = _TYPE_RULES[kind]
        return rule, "remove the line, or give it a value" if value is None else remedy(value)
    if kind in _LIMITS:
        key, rule, remedy = _LIMITS[kind]
        return rule.format(context[key]), remedy.format(context[key])
    message = message.removeprefix("Value error, ")
    return message[:1].lower() + message[1:], "give it a value that keeps this rule"


def _one_of(value: Any, expected: str) -> tuple[str, str]:
    known = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    more = f", or {len(known) - 9} longer spellings such as {known[9]}" if len(known) > 9 else ""
    rule = f"one of {', '.join(known[:9])}{more}"
    if isinstance(value, bool):
        return rule, "YAML reads on, off, yes and no as true and false: write one of the names"
    if value is None:
        return rule, "remove the line, or give it a value"
    return rule, close(str(value), known) or "write one of them"


def _as_integer(value: Any) -> str:
    if isinstance(value, bool):
        return "write a number, not true or false"
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    digits = value.strip().replace("_", "") if isinstance(value, str) else ""
    plainly = re.fullmatch(r"-?[0-9]+", digits)
    return f"write {int(digits)}, without quotes" if plainly else "write a number such as 512"


def _as_boolean(value: Any) -> str:
    word = str(value).strip().casefold()
    if word in ("1", "yes", "true", "on", "y"):
        return "write true, without quotes"
    return (
        "write false, without quotes"
        if word in ("0", "no", "false", "off", "n")
        else "write true or false"
    )


def _as_float(value: Any) -> str:
    try:
        written = isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        written = False
    return f"write {float(value)}, without quotes" if written else "write a number such as 0.5"


def _of_number(model: type[BaseModel], path: Path, value: Any, rule: str) -> str:
    """Add to `a number` that it is finite, where it is not, and the limits of its key."""
    field = _owner(model, path[:-1]).model_fields.get(str(path[-1]))
    limits = {_LIMITS[kind][0]: _LIMITS[kind][1].removeprefix("a number ") for kind in _LIMITS}
    said = [
        words.format(float(getattr(limit, key)))
        for limit in getattr(field, "metadata", ())
        for key, words in limits.items()
        if hasattr(limit, key)
    ]
    finite = "a finite number" if _infinite(value) else rule
    return f"{finite} {' and '.join(said)}".rstrip()


def _infinite(value: Any) -> bool:
    try:
        return not math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def _as_list(value: Any) -> str:
    return f"write a list: [{value}]" if isinstance(value, str) else "write a list: [first, second]"


_TYPE_RULES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "int_type": ("a whole number", _as_integer),
    "bool_type": ("true or false", _as_boolean),
    "float_type": ("a number", _as_float),
    "finite_number": ("a finite number", _as_float),
    "string_type": ("text", lambda value: f'put it in quotes: "{value}"'),
    "tuple_type": ("a list", _as_list),
    "model_type": (
        "a mapping of keys to values",
        lambda value: "write its keys indented below it, or as {key: value}",
    ),
    "dict_type": (
        "a mapping of keys to values",
        lambda value: "write its keys indented below it, or as {key: value}",
    ),
}
_FLOATS = ("float_type", "finite_number")
_LIMITS = {
    "greater_than": ("gt", "a number above {}", "write more than {}"),
    "greater_than_equal": ("ge", "a number of at least {}", "write {} or more"),
    "less_than": ("lt", "a number below {}", "write less than {}"),
    "less_than_equal": ("le", "a number of at most {}", "write {} or less"),
}
