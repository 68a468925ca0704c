"""Translates pydantic's `ValidationError` into errors with setting, value, rule and remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import ValidationError

from maxattn.config.errors import Locate, Path, close, dotted, located, plain, problem, show
from maxattn.config.fields import Model, field_at, inner_keys, keys_of, owner, section_type
from maxattn.config.value_rules import FLOATS, is_type_error, rule_and_remedy, with_limits
from maxattn.errors import ConfigError

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

MOST_PROBLEMS = 100  # that are listed: the words for one are searched for among all keys


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
    if isinstance(raised, ConfigError):
        yield from (located(p, locate, path) for p in getattr(raised, "problems", (raised,)))
    elif kind == "extra_forbidden":
        yield _unknown_key(model, path, value, locate(path))
    elif kind == "missing":
        yield _missing(model, path, locate(path))
    else:
        yield _wrong_value(model, detail, locate(path))


def _wrong_value(model: Model, detail: ErrorDetails, where: str) -> ConfigError:
    path, kind, value = detail["loc"], detail["type"], detail["input"]
    rule, remedy = rule_and_remedy(kind, value, detail.get("ctx", {}), detail["msg"])
    if kind in FLOATS:
        rule = with_limits(rule, value, field_at(model, path))
    if where.startswith("override"):
        remedy = remedy.replace("remove the line", "remove the override")
    shown = show(value) if is_type_error(kind) else plain(value)
    return problem(dotted(path), shown, rule, remedy, where)


def _missing(model: Model, path: Path, where: str) -> ConfigError:
    rule = "it has no default and must be set"
    return problem(dotted(path), "not set", rule, _remedy_for_missing(model, path), where)


def _remedy_for_missing(model: Model, path: Path) -> str:
    if isinstance(path[-1], int):
        return f"write {path[-1] + 1} values or more"
    section = section_type(field_at(model, path))
    if section is None:
        return f"add a line `{path[-1]}: value`"
    required = [name for name, inner in section.model_fields.items() if inner.is_required()]
    return f"add `{path[-1]}:` and below it {', '.join(required) or 'its keys'}"


def _unknown_key(model: Model, path: Path, value: object, where: str) -> ConfigError:
    """Say that a section has no such key, and which one may have been meant."""
    section, word = owner(model, path[:-1]), str(path[-1])
    rule = f"{dotted(path[:-1]) or 'the config'} has no key '{word}'"
    remedy = _remedy_for_key(model, section, word)
    return problem(dotted(path), plain(value), rule, remedy, where)


def _remedy_for_key(model: Model, section: Model, word: str) -> str:
    if ":" in word:
        return f"put a space after the colon: '{word.replace(':', ': ', 1)}'"
    guess = close(word, section.model_fields)
    if guess or section is not model:
        return guess or f"remove it; the keys here are {', '.join(keys_of(section))}"
    inner = inner_keys(model)
    same = close(word, inner).removeprefix("did you mean '").removesuffix("'?")
    if same:
        return f"did you mean '{inner[same]}'?"
    return "remove it; configs/attention.yml lists every key"
