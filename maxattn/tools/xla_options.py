"""Read options of XLA's compiler, written as NAME=VALUE with the names of XLA_FLAGS."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax

from maxattn.errors import ConfigError

VALUES = {"true": True, "false": False}
MODES = {name: f"COLLECTIVES_{name.upper()}_MEMORY" for name in ("private", "symmetric", "peer")}
SPELT = {"xla_gpu_collective_permute_mode": MODES}
"""By option: how XLA_FLAGS spells a value, and how `compiler_options` spells the same value."""


def xla_options(words: Iterable[str], setting: str = "--option") -> dict[str, Any]:
    """Read options for `jax.jit(compiler_options=...)`; refuse options that this machine's compiler
    does not know.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not name:
            remedy = "write for example xla_gpu_autotune_level=2"
            raise ConfigError(setting, repr(word), "it must be NAME=VALUE", remedy)
        name = name.removeprefix("--")
        options[name] = (VALUES | SPELT.get(name, {})).get(value.lower(), value)
    for name, value in options.items():
        if why := refusal(name, value):
            rule = f"the compiler of jax {jax.__version__} refuses it: {why}"
            remedy = "write it as in XLA_FLAGS, without the dashes; switches as true or false"
            raise ConfigError(setting, f"{name}={value}", rule, remedy)
    return options


@lru_cache(maxsize=256)
def refusal(name: str, value: Any) -> str:
    """Return why the compiler refuses an option, or ""; the result is cached."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError) as refused:
        return str(refused).partition("\n")[0]
    return ""
