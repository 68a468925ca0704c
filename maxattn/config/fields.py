"""What a pydantic model says of its fields: their sections, defaults and keys."""

from __future__ import annotations

from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from maxattn.config.errors import Path

Model = type[BaseModel]


def section_type(field: FieldInfo | None) -> Model | None:
    """Return the model that a field holds, null or not; None for a plain value."""
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    models = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return next(models, None)


def keys_of(section: Model | None) -> tuple[str, ...]:
    """List the keys of a section; none of a plain value."""
    return tuple(section.model_fields) if section else ()


def defaults(model: Model) -> dict[str, Any]:
    """Return the default of every field that has one, by name."""
    optional = ((k, f) for k, f in model.model_fields.items() if not f.is_required())
    return {k: f.get_default(call_default_factory=True, validated_data={}) for k, f in optional}


def owner(model: Model, path: Path) -> Model:
    """Return the section at a path, starting from the outermost model."""
    for part in path:
        model = section_type(model.model_fields.get(str(part))) or model
    return model


def field_at(model: Model, path: Path) -> FieldInfo | None:
    """Return the field at a path, or None if there is none."""
    return owner(model, path[:-1]).model_fields.get(str(path[-1]))


def inner_keys(model: Model) -> dict[str, str]:
    """Return the dotted path of each key of the sections."""
    sections = ((name, section_type(field)) for name, field in model.model_fields.items())
    return {key: f"{name}.{key}" for name, section in sections for key in keys_of(section)}
