"""Weights under the names of a model's own code, as those who train with that code save them.

Their programs wrap the model, so the names begin with the wrappers': "generator_ema.model." are the
averaged parameters of Self-Forcing and its kin, "generator.model." those of the last step, and
FSDP leaves a word of its own within.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from maxattn.errors import WeightsError
from maxattn.weights.names import Entry
from maxattn.weights.naming import wan

log = logging.getLogger("maxattn")

FAMILIES: Final = (wan.originals,)
# Averaged parameters first: they draw better than those of the last step.
PREFIXES: Final = (
    "generator_ema.model.",
    "generator_ema.",
    "generator.model.",
    "generator.",
    "model.",
    "",
    "model.diffusion_model.",
    "diffusion_model.",
)
FSDP: Final = "_fsdp_wrapped_module."
_ENDS: Final = (".weight", ".bias")


def in_our_names(
    held: Mapping[str, Any], wanted: tuple[Entry, ...], prefix: str
) -> Mapping[str, Any]:
    """Return tensors under diffusers' names, where they have those of the model's own code.

    Args:
        held: the tensors.
        wanted: those of the module, each name with the prefix.
        prefix: of the tensors that are meant; "" looks for one of `PREFIXES`.

    Returns:
        The tensors behind the prefix, in diffusers' names where the module has one; all of them as
        they are where no name of the model's own code is there.

    Raises:
        WeightsError: two tensors come to one name.
    """
    bare = [entry.name.removeprefix(prefix) for entry in wanted]
    clean = _without_fsdp(held)
    for family in FAMILIES:
        theirs = _originals(family, bare)
        begins = (prefix,) if prefix else PREFIXES
        there = [begin for begin in begins if any(begin + name in clean for name in theirs)]
        if there:
            say_which(there)
            return _renamed(held, clean, theirs, there[0], prefix)
    return held


def say_which(there: list[str]) -> None:
    """Log which weights of a file are taken, where it holds those of several models."""
    if len(there) > 1:
        others = " and ".join(f'"{begin}"' for begin in there[1:])
        told = (
            'weights: those that begin with "%s" are taken, and %s left out; prefix= names others'
        )
        log.warning(told, there[0], others)


def _originals(family: Any, bare: Iterable[str]) -> dict[str, str]:
    """Return our name of each tensor that the model's own code names otherwise, by its name."""
    of_layer = {name: _split(name) for name in bare}
    renamed = family({layer for layer, _ in of_layer.values()})
    return {
        renamed[layer] + end: name for name, (layer, end) in of_layer.items() if layer in renamed
    }


def _split(name: str) -> tuple[str, str]:
    end = next((end for end in _ENDS if name.endswith(end)), "")
    return name.removesuffix(end), end


def _without_fsdp(held: Mapping[str, Any]) -> dict[str, str]:
    """Return the name of each tensor in the file, by its name without FSDP's word."""
    clean: dict[str, str] = {}
    for name in held:
        if (other := clean.setdefault(name.replace(FSDP, ""), name)) != name:
            rule = f"{other} is the same parameter, but for FSDP's word"
            raise WeightsError("weights", name, rule, "leave one of them out of the file")
    return clean


def _renamed(
    held: Mapping[str, Any],
    clean: Mapping[str, str],
    theirs: Mapping[str, str],
    begin: str,
    prefix: str,
) -> dict[str, Any]:
    """Take what stands behind a prefix; what no rule names keeps its name."""
    found = {}
    for name, in_file in clean.items():
        if name.startswith(begin):
            rest = name.removeprefix(begin)
            found[prefix + theirs.get(rest, rest)] = held[in_file]
    return found
