"""Options of XLA's compiler, as a command line or a file gives them: NAME=VALUE."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import jax

import maxattn as ma
from maxattn.errors import ConfigError

SWITCHES = {"true": True, "false": False}
MODES = {name: f"COLLECTIVES_{name.upper()}_MEMORY" for name in ("private", "symmetric", "peer")}
# XLA for GPUs joins products that share an input, and copies their weights together in every step.
# Behind a product that it writes in Triton a gelu is a pass of its own; cuBLAS's product takes it.
FOR_SAMPLING = {"gpu": {"xla_gpu_dot_merger_threshold_mb": 0, "xla_gpu_enable_triton_gemm": False}}
# Values that XLA_FLAGS spells in one way and `compiler_options` in another.
SPELT = {"xla_gpu_collective_permute_mode": MODES}


def xla_options(words: Iterable[str], setting: str = "--option") -> dict[str, Any]:
    """Read options for `jax.jit(compiler_options=...)`, and check that the compiler knows them.

    Args:
        words: NAME=VALUE each, the names as in XLA_FLAGS; true and false are switches.
        setting: what the options are called in errors.

    Raises:
        ConfigError: a word has another form, or the compiler refuses an option.
    """
    options = dict(_option(word, setting) for word in words)
    for name, value in options.items():
        if why := _refusal(name, value):
            rule = f"the compiler of jax {jax.__version__} refuses it: {why}"
            remedy = "write it as in XLA_FLAGS, without the dashes; switches as true or false"
            raise ConfigError(setting, f"{name}={value}", rule, remedy)
    return options


def sampling_options(words: Iterable[str], setting: str = "--option") -> dict[str, Any]:
    """Read options for a program that samples, after those that help on this platform.

    Args:
        words, setting: as for `xla_options`.

    Raises:
        ConfigError: as `xla_options` does.
    """
    usual = FOR_SAMPLING.get(ma.Target.here().platform, {})
    known = {name: value for name, value in usual.items() if not _refusal(name, value)}
    return known | xla_options(words, setting)


@lru_cache(maxsize=256)
def _refusal(name: str, value: Any) -> str:
    """Return why the compiler does not take an option, or an empty text. It is asked once."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError) as refused:
        return str(refused).partition("\n")[0]
    return ""


def _option(word: str, setting: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals or not name:
        remedy = "write for example xla_gpu_autotune_level=2"
        raise ConfigError(setting, repr(word), "it is NAME=VALUE", remedy)
    name = name.removeprefix("--")
    return name, (SWITCHES | SPELT.get(name, {})).get(value.lower(), value)
