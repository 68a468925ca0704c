"""Settings that replace those of every config, for the self-attention that is traced inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from maxattn.config.settings import AttentionConfig

_OVERRIDES: ContextVar[Mapping[str, Any] | None] = ContextVar("maxattn.overrides", default=None)


@contextmanager
def overriding(settings: Mapping[str, Any]) -> Iterator[None]:
    """Replace settings of the configs of self-attention that is traced inside; {} for none."""
    token = _OVERRIDES.set(settings)
    try:
        yield
    finally:
        _OVERRIDES.reset(token)


def overridden(config: AttentionConfig) -> AttentionConfig:
    """Return a config with the settings that replace its own here."""
    settings = _OVERRIDES.get()
    return config.replace(**settings) if settings else config
