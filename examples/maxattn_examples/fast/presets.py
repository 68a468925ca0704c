"""Presets of `sampling.fast`: settings by name, in presets.yml, under those of the user."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from maxattn.config import Section

from .settings import FastSettings

FILE = Path(__file__).with_name("presets.yml")


@cache
def presets() -> Mapping[str, Mapping[str, Any]]:
    """Read the file: families, presets, sections."""
    return yaml.safe_load(FILE.read_text("utf-8"))


def settled(fast: FastSettings, family: str) -> FastSettings:
    """Return settings with those of their preset, which their own keys replace.

    Args:
        fast: `sampling.fast`.
        family: of the model.
    """
    if fast.preset is None:
        return fast
    usual = dict(presets()[family][fast.preset])
    if fast.cache is not None and fast.cache.kind not in (None, "shape"):
        del usual["cache"]  # its order and layers are of its own kind
    return FastSettings(**_over(usual, fast))


def _over(usual: Mapping[str, Any], given: Section) -> dict[str, Any]:
    """Return the values that are given over the usual ones, section by section."""
    found = dict(usual)
    for key in given.model_fields_set:
        value, before = getattr(given, key), usual.get(key)
        if isinstance(value, Section) and isinstance(before, Mapping):
            value = _over(before, value)
        found[key] = value
    return found
