"""The errors of a config. Each problem has its key, value, rule, remedy, file and line.

`translated` converts pydantic's errors.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from maxattn.config.numbers import LONGEST
from maxattn.errors import ConfigError, closest, did_you_mean, escaped

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

Path = tuple[str | int, ...]
Locate = Callable[[Path], str]
Model = type[BaseModel]
SHOWN = 80  # most characters of a value in an error
MOST_TEXT = 1000  # most characters of a rule, a remedy, or a key with its path


class ConfigErrors(ConfigError):
    """One error that reports all problems of a config.

    Args:
        problems: at least one; `setting`, `value`, `rule` and `remedy` are those of the first.
        source: the file, which the headline above several problems names.
    """

    def __init__(self, problems: Iterable[ConfigError], source: str = "") -> None:
        self.problems = tuple(problems)
        first = self.problems[0]
        super().__init__(first.setting, first.value, first.rule, first.remedy, first.where)
        if len(self.problems) > 1:
            headline = f"{source or 'config'}: {len(self.problems)} problems"
            self.args = ("\n".join((headline, *map(str, self.problems))),)


def problem(setting: str, value: str, rule: str, remedy: str, where: str = "") -> ConfigError:
    """Make a ConfigError; shorten long texts and escape unprintable characters."""
    setting, rule, remedy = (printable(text, MOST_TEXT) for text in (setting, rule, remedy))
    return ConfigError(setting, printable(value), rule, remedy, where)


def refused(setting: str, value: str, rule: str, remedy: str, where: str = "") -> ConfigErrors:
    """Make a `ConfigErrors` with one problem."""
    return ConfigErrors([problem(setting, value, rule, remedy, where)])


def located(found: ConfigError, locate: Locate, prefix: Path = ()) -> ConfigError:
    """Add file, line and full dotted key to a problem."""
    path: Path = (*prefix, *found.setting.split("."))
    where = found.where or locate(path)
    return problem(dotted(path), str(found.value), found.rule, found.remedy, where)


def dotted(path: Sequence[str | int]) -> str:
    """Write a key's path in dotted form: `flash_block_sizes.block_q`, `mesh_axes[2]`."""
    parts = (f"[{p}]" if isinstance(p, int) else f".{p or '(no name)'}" for p in path)
    return "".join(parts).removeprefix(".")


def plain(value: object) -> str:
    """Write a value as YAML, but without quotes around text."""
    return printable(value) if isinstance(value, str) and value else show(value)


def show(value: object) -> str:
    """Write a value as YAML, shortened; text is quoted, so that "512" and 512 differ."""
    try:
        return escaped(_short(json.dumps(value, ensure_ascii=False, default=str)))
    except (TypeError, ValueError, RecursionError):  # circular, too deep, or with too many digits
        return f"({type(value).__name__}, too long to show)"


def _short(text: str, most: int = SHOWN) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def printable(text: str, most: int = SHOWN) -> str:
    """Shorten a text, and escape unprintable characters, such as NUL, as JSON does."""
    odd = "" if text.isprintable() else escaped(json.dumps(text[:most], ensure_ascii=False))
    return _short(odd or text, most)


# ---- pydantic's errors ---------------------------------------------------------------------------

MOST_PROBLEMS = 100  # most problems in an error, since looking for similar keys takes time
EMPTY = "remove the line, or give it a value"
# Names of kernels in torch, diffusers and transformers, by what to write for them.
_KERNELS = {
    "write auto, or dot_product for plain XLA": "native sdpa default",
    "write dot_product": "_native_math math eager xla vanilla",
    "write auto, or flash": "_native_flash _native_efficient efficient _flash_3 _flash_3_hub sage"
    " flash_hub flash_attention flash_attention_2 flash_attention_3 flash_varlen xformers flex",
    "write cudnn": "_native_cudnn",
    "write flash, which is FlashAttention-4 on NVIDIA GPUs": "fa4 flash_4 flash_attention_4",
}
_FOREIGN = {name: remedy for remedy, names in _KERNELS.items() for name in names.split()}
NAMED = 10  # most choices that a rule lists; it gives the number of further choices
# pydantic's name of an error -> (its name of the bound, our rule, our remedy)
LIMITS = {
    "greater_than": ("gt", "above {}", "write more than {}"),
    "greater_than_equal": ("ge", "of at least {}", "write {} or more"),
    "less_than": ("lt", "below {}", "write less than {}"),
    "less_than_equal": ("le", "of at most {}", "write {} or less"),
}


def translated(model: Model, error: ValidationError, locate: Locate) -> list[ConfigError]:
    """Translate each problem that pydantic found; `locate` returns `file:line` of a key."""
    details = error.errors()
    listed = [p for detail in details[:MOST_PROBLEMS] for p in _translate(model, detail, locate)]
    if (more := len(details) - MOST_PROBLEMS) > 0:
        rule = f"an error lists the first {MOST_PROBLEMS} problems"
        listed.append(problem("config", f"{more} more problems", rule, "correct these first"))
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
        shown = show(value) if kind in _TYPES else shown  # quotes show that a text is no number
        rule, remedy = _rule_and_remedy(detail)
        if kind in ("float_type", "finite_number"):
            rule = _with_limits(rule, value, getattr(_field_at(model, path), "metadata", ()))
        if where.startswith("override"):
            remedy = remedy.replace("remove the line", "remove the override")
    yield problem(dotted(path), shown, rule, remedy, where)


# ---- keys ----------------------------------------------------------------------------------------


def _remedy_for_missing(model: Model, path: Path) -> str:
    if isinstance(path[-1], int):
        return f"write {path[-1] + 1} values or more"
    section = section_type(_field_at(model, path))
    if section is None:
        return f"add a line `{path[-1]}: value`"
    required = [name for name, inner in section.model_fields.items() if inner.is_required()]
    return f"add `{path[-1]}:` and below it {', '.join(required) or 'its keys'}"


def _remedy_for_key(model: Model, path: Path) -> str:
    section, word = _owner(model, path[:-1]), str(path[-1])
    if ":" in word:
        return f"put a space after the colon: '{word.replace(':', ': ', 1)}'"
    guess = getattr(section, "former", {}).get(word) or did_you_mean(word, section.model_fields)
    if guess or section is not model:
        return guess or f"remove it; the keys of this section are {', '.join(section.model_fields)}"
    inner = {key: f"{name}.{key}" for name in model.model_fields for key in keys_of(model, name)}
    if same := closest(word, inner):
        return f"did you mean '{inner[same]}'?"
    return "remove it; `maxattn config` lists every key"


# ---- values --------------------------------------------------------------------------------------


def _rule_and_remedy(detail: ErrorDetails) -> tuple[str, str]:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "maxattn":
        return context["rule"], context["remedy"]
    if kind == "literal_error":
        return _one_of(value, context["expected"])
    if kind in _TYPES:
        rule, remedy = _TYPES[kind]
        return f"it must be {rule}", EMPTY if value is None else remedy(value)
    if kind in LIMITS:
        key, rule, remedy = LIMITS[kind]
        limit = context[key]
        return f"it must be a number {rule.format(limit)}", remedy.format(limit)
    message = detail["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:], "write a value that satisfies this rule"


def _with_limits(rule: str, value: Any, metadata: Any) -> str:
    """Add a field's limits to the rule, and "finite" if the value is not finite."""
    try:
        is_finite = math.isfinite(float(value))
    except OverflowError:  # an int that exceeds the range of floats
        is_finite = False
    except (TypeError, ValueError):
        is_finite = True
    found = [
        words.format(float(getattr(each, key)))
        for each in metadata
        for key, words, _ in LIMITS.values()
        if hasattr(each, key)
    ]
    return f"{rule if is_finite else 'it must be a finite number'} {' and '.join(found)}".rstrip()


def _one_of(value: Any, expected: str) -> tuple[str, str]:
    known = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    longer = known[NAMED:]
    more = f", or {len(longer)} longer spellings such as {longer[0]}" if longer else ""
    rule = f"it must be one of {', '.join(known[:NAMED])}{more}"
    if isinstance(value, bool):
        return rule, "YAML reads on, off, yes and no as true and false: write one of the names"
    if value is None:
        return rule, EMPTY
    foreign = _FOREIGN.get(plain(value)) if "dot_product" in known else None
    return rule, foreign or did_you_mean(plain(value), known) or "write one of them"


def _as_integer(value: Any) -> str:
    if isinstance(value, bool):
        return "write a number, not true or false"
    if isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    digits = value.strip().replace("_", "") if isinstance(value, str) else ""
    is_whole = re.fullmatch(rf"-?[0-9]{{1,{LONGEST}}}", digits)
    return f"write {int(digits)}, without quotes" if is_whole else "write a number such as 512"


def _as_boolean(value: Any) -> str:
    word = plain(value).strip().casefold()
    if word in ("1", "yes", "true", "on", "y"):
        return "write true, without quotes"
    if word in ("0", "no", "false", "off", "n"):
        return "write false, without quotes"
    return "write true or false"


def _as_float(value: Any) -> str:
    try:
        is_text = isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        is_text = False
    if not is_text:
        return "write a number such as 0.5"
    # PyYAML reads 1e-2 as text, without quotes too.
    return f"write {float(value)}" + ("" if "e" in value.lower() else ", without quotes")


_MAPPING = (
    "a mapping of keys to values",
    lambda value: "write its keys indented below it, or as {key: value}",
)
_TYPES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "int_type": ("a whole number", _as_integer),
    "bool_type": ("true or false", _as_boolean),
    "float_type": ("a number", _as_float),
    "finite_number": ("a finite number", _as_float),
    "string_type": ("text", lambda value: f'put it in quotes: "{value}"'),
    "tuple_type": (
        "a list",
        lambda value: f"write a list: [{value if isinstance(value, str) else 'first, second'}]",
    ),
    "model_type": _MAPPING,
    "dict_type": _MAPPING,
}
"""pydantic's name of a type error -> (the right type, a function from the value to the remedy)."""

# ---- fields of a model ---------------------------------------------------------------------------


def section_type(field: FieldInfo | None) -> Model | None:
    """Return the section class of a field, also if it is optional; None for a plain value."""
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    models = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next(models, None)


def keys_of(model: Model, name: str) -> tuple[str, ...]:
    """List the keys of the section in field `name`; none if the field has a plain value."""
    section = section_type(model.model_fields[name])
    return tuple(section.model_fields) if section else ()


def defaults(model: Model) -> dict[str, Any]:
    """Return the default of every field that has one, by name."""
    optional = ((k, f) for k, f in model.model_fields.items() if not f.is_required())
    return {k: f.get_default(call_default_factory=True, validated_data={}) for k, f in optional}


def _owner(model: Model, path: Path) -> Model:
    for part in path:
        model = section_type(model.model_fields.get(str(part))) or model
    return model


def _field_at(model: Model, path: Path) -> FieldInfo | None:
    return _owner(model, path[:-1]).model_fields.get(str(path[-1]))
