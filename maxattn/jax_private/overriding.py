"""Settings that replace those of every config, for the self-attention that is traced inside.

They are part of what `jit` keeps traces by: a function that was traced without them is traced anew.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import jax

overriding = jax.make_user_context(())
"""Replaces settings, given as a tuple of (key, value), in a `with` block."""


class Replaceable(Protocol):
    """A config."""

    def replace(self, **changes: Any) -> Any:
        """Return a copy with some keys changed."""
        ...


Config = TypeVar("Config", bound=Replaceable)


def overridden(config: Config) -> Config:
    """Return a config with the settings that replace its own here."""
    settings = overriding.value
    return config.replace(**dict(settings)) if settings else config
